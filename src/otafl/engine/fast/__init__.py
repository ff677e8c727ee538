"""What is there only for speed; the readable engine is the oracle."""
