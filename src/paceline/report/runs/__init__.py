"""Several runs: their list, and what differs between them."""
