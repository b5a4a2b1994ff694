"""Local SGD: workers train independently, and average their weights every few steps."""
