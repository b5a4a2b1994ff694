"""A node's place among the nodes of a training that several of them run together."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where this node stands, and the store in which the nodes find each other."""

    node_rank: int
    nodes: int
    host: str
    """Of the store, as this node reaches it."""
    port: int
    ends_together: bool = False
    """Whether nodes that have done their work wait for the others, one of which keeps the store."""
    interface: str = ""
    """Network interface for the workers' sockets; empty: the user's choice, or loopback."""
