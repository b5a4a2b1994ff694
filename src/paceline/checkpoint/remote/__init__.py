"""Copies a run's snapshots and small files to remote storage: an object store, another disk.

Imports no torch: a process of its own copies, beside the training.
"""
