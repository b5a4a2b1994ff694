"""Loads batches in separate processes, and copies them to the device while it computes."""
