"""What a training leaves behind: the run directory, its files, profile.json. Imports no torch."""
