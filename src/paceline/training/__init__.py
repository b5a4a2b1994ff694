"""The session of a worker, and the training loop written on top of it."""
