"""Run directories: written safely, read back without a simulator."""
