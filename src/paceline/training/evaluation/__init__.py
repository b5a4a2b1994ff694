"""Evaluation that counts every sample exactly once, during a training and after it."""
