"""What facts mean for a training: pure functions from facts to findings."""
