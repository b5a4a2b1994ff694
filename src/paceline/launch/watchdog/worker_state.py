"""What is known of a worker from outside its interpreter. Holds ages, never times: no two hosts'
clocks are compared."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Literal, get_args

ProcessState = Literal["running", "stopped", "traced", "gone"]
"""How the system sees a process; traced: a debugger holds it."""


@dataclass(frozen=True, kw_only=True)
class WorkerState:
    """One worker at one moment, as its own host sees it. A field for each key of its JSON."""

    rank: int
    host: str
    pid: int
    process: ProcessState
    busy: float
    """Cores that it kept busy of late: 0.0 for one that sleeps."""
    step: int | None
    """The step that it computes; None before the first."""
    operation: str
    """What it does, such as `data`, `step`, `snapshot`; see `launch.heartbeat.STEPPING`."""
    collectives: int
    """How many collectives it has begun; all workers count alike."""
    collective: str
    """The collective that it is in; empty where it is in none."""
    step_age_s: float
    """For how long it has been at this step, as far as it was watched."""
    age_s: float
    """For how long nothing that it tells has changed."""
    median_step_s: float | None
    """Usual time from one step to the next; None before that can be said."""
    steps: int = 0
    """Steps that the times below are about."""
    total_s: float = 0.0
    """Time of these steps, of which"""
    data_s: float = 0.0
    """was spent waiting for data,"""
    waiting_s: float = 0.0
    """and waiting for other workers."""
    stop_s: float = 0.0
    """How long it takes to stop, see `Reading`."""

    @property
    def name(self) -> str:
        """Name the worker and where it is."""
        return f"rank {self.rank} on {self.host} (process {self.pid})"

    def to_json(self) -> dict[str, object]:
        """Give the fields as a JSON object."""
        return asdict(self)

    @staticmethod
    def from_json(content: object) -> "WorkerState":
        """Read what `to_json` gave.

        Raises:
            ValueError: It isn't a worker's state.
        """
        names = {field.name for field in fields(WorkerState)}
        if not isinstance(content, Mapping) or set(content) != names:
            raise ValueError("not the state of a worker")
        if content["process"] not in get_args(ProcessState) or not isinstance(content["rank"], int):
            raise ValueError("not the state of a worker")
        return WorkerState(**content)
