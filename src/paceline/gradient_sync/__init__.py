"""Combines the gradients of all workers: averages, ordered sums, compression."""
