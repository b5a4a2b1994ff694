"""Snapshots: format, atomic store, background writer."""
