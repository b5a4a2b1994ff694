"""Optimizers by name, learning-rate scaling, warm-up, schedules."""
