"""Step hooks: checks, learning rate, logging and the like, one a file; interface in `base.py`."""
