"""Doors to other tools, each imported only where it is used."""
