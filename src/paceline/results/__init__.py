"""The run directory and its files (metrics, profile, study). Imports no torch."""
