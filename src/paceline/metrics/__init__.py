"""Exact counters over all workers; CSV, TensorBoard, console."""
