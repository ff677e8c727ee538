"""Other people's systems, each imported only inside the function that needs it."""
