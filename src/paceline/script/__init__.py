"""Training scripts of the user's own: `paceline.session`, `paceline.launch`, `paceline run`."""
