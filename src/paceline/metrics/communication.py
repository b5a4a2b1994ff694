"""What steps spend on communication."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Communication:
    """By rank 0's clock and all workers' waits."""

    exposed: float
    """Share of the time in which the slowest worker waits for communication."""
    waiting: float
    """Share in which the workers wait for the slowest, on average."""
    wire_bytes: float
    """What one worker sends in a step."""
