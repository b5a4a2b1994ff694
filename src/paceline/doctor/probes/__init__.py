"""What a host finds out about itself and its links to the others; runs on each host."""
