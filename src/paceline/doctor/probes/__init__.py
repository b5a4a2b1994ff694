"""What a host finds out about itself and its ways to the others; runs on each host."""
