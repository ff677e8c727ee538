"""Between the antennas: superposition, noise, energy, and who knows which channel."""
