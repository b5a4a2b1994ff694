"""Trackers such as W&B and MLflow, fed from a run's own files by a process of its own."""
