"""The causes that are known, each with a function that looks for it."""
