"""Many runs: sweeps, tuning, worker processes."""
