"""Keeps what a verified training and its processes write away from the user's files."""
