"""Metadata of a training in run.json: settings, versions, hardware; checked on resuming."""
