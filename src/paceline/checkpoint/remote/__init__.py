"""Copies of a run's snapshots and small files at a place elsewhere: an object store, another disk.

Imports no torch: a process of its own copies, beside the training.
"""
