"""Rooms of single papers: what is about one paper and not about the field."""
