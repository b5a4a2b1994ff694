"""Batches read by processes of their own, and brought to the device beside what it computes."""
