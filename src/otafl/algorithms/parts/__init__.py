"""What methods share, as functions."""
