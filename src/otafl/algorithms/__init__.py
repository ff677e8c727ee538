"""The papers, one module each."""
