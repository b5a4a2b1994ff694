"""What a training is made of: recorded in run.json, compared by workers and by resumed runs."""
