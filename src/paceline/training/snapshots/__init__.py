"""Saves and restores a training: collects its state, finds and transfers snapshots."""
