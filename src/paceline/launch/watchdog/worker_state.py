"""What is known of a worker from outside its interpreter. Holds ages, never times: no two hosts'
clocks are compared."""

from dataclasses import dataclass
from typing import Literal

from paceline.launch.heartbeat import Reading

ProcessState = Literal["running", "stopped", "traced", "gone"]
"""How the system sees a process; traced: a debugger holds it."""


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """One worker at one moment, as its own host sees it."""

    rank: int
    host: str
    pid: int
    process: ProcessState
    busy: float
    """Cores that it kept busy of late: 0.0 for one that sleeps."""
    reading: Reading
    """What it tells of itself."""
    step_age_s: float
    """For how long it has been at this step, as far as it was watched."""
    age_s: float
    """For how long nothing that it tells has changed."""
    median_step_s: float | None
    """Usual time from one step to the next; None before that can be said."""

    @property
    def name(self) -> str:
        """Name the worker and where it is."""
        return f"rank {self.rank} on {self.host} (process {self.pid})"
