"""How a worker failed: its record, what GPUs' errors say, which failure was the cause."""
