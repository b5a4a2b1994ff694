"""Trains a model on one worker: the session that scripts use, its engine, and recipes' loop."""
