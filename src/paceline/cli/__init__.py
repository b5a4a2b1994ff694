"""One small file per command: parses, calls, prints."""
