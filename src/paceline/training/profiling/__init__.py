"""Profiles steps on each worker, and combines the results in profile.json."""
