"""What a run is: its configuration, typed and validated, and the presets."""
