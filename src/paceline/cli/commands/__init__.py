"""One file per command: parses its options, calls, prints."""
