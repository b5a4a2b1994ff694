"""The `paceline` command, and what its commands have in common: options, output, completion."""
