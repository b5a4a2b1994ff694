"""Training over several hosts that ssh reaches. Only the store's module imports torch."""
