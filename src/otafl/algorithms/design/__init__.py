"""Power control solved beforehand, as pure functions on arrays."""
