"""Batches of a training: how the global batch is split over steps, workers and data sources."""
