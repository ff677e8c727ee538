"""What exists before anyone learns: data, geometry, motion and channels."""
