"""Inside the devices: models, flat vectors, local training."""
