"""What all parts share: option fields, the run directory, durations, files. Imports no torch."""
