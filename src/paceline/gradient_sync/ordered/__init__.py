"""Sums of gradients in an order that doesn't depend on the number of workers."""
