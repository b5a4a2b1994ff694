"""Users' training scripts: `paceline.session`, `paceline.notebook_launcher`, `paceline run`."""
