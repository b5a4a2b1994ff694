"""Workers that train on their own between averages of their weights."""
