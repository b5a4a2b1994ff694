"""A training's snapshots: taken apart, found on every node, transferred, put back together."""
