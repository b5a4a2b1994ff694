"""Faults for whole trainings: what can be done, how that is to end, how it is checked."""
