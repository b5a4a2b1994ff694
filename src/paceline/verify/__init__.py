"""Questions about a training: `paceline verify` asks whether it is the same on any number."""
