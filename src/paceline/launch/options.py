"""Options of launching: how many workers, with how many threads, restarted how often."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from paceline.errors import UsageError
from paceline.launch.registry import PLACES, launcher_names
from paceline.launch.worker_count import check_count
from paceline.options.durations import MAX_WAIT_S
from paceline.options.fields import check_at_least

if TYPE_CHECKING:
    On = str
else:
    On = Literal[*PLACES, *launcher_names()]


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Where and how often the worker processes are started."""

    workers: int | None = None
    """Worker processes to start. Default: one per GPU, or 2 on a machine without (never more than
    its cores). More CPU workers than cores can be asked for; they share the cores."""

    threads: int | None = None
    """CPU threads per worker. Default: the cores shared out evenly, at least 1; with --shards 1, so
    that the bits don't follow the machine."""

    numa_affinity: Literal["auto", "on", "off"] = "auto"
    """Keep each GPU worker on the CPU cores of its GPU's NUMA node. auto: where no core of the node
    is left unused by that; on: also then; off: leave the workers where they are."""

    max_restarts: int = 3
    """Restarts allowed in a row without a newer snapshot; each newer snapshot refills them."""

    hang_after_s: float | None = None
    """Seconds without a finished step after which the workers count as hanging, and are ended and
    started again; at least 10 times the median step. 0: nobody looks. Default: 30, with --compile
    120. Where no step is due (before the first, in an evaluation), --timeout-s counts."""

    stop_grace_s: float | None = None
    """Seconds that workers have after a request to stop (Ctrl-C, SIGTERM) to finish their step and
    write a snapshot; then they are killed. Default: twice what a step and the last snapshot took,
    from 3.5 (60 on nodes where a service such as Kubernetes has started this process; its own limit
    has to be longer) to 120."""

    on: On = "auto"
    """Where workers run: local starts them on this machine, here makes this process the worker,
    auto picks here when torchrun (or the like) started it and local otherwise. node: srun has
    started this process, once a node, and it starts the node's workers. The others render the
    training for a cluster."""

    def __post_init__(self) -> None:
        """Check the ranges.

        Raises:
            UsageError: A count is out of range.
        """
        check_at_least(self, workers=1, threads=1, max_restarts=0)
        if self.workers is not None:
            check_count(self.workers)
        if self.stop_grace_s is not None and not 0 < self.stop_grace_s <= MAX_WAIT_S:
            raise UsageError(
                f"--stop-grace-s is {self.stop_grace_s}; it must be a number of seconds over 0, at "
                f"most {MAX_WAIT_S:,.0f}"
            )
        if self.hang_after_s is not None and not 0 <= self.hang_after_s <= MAX_WAIT_S:
            raise UsageError(
                f"--hang-after-s is {self.hang_after_s}; it must be a number of seconds, at most "
                f"{MAX_WAIT_S:,.0f}, or 0 to switch it off"
            )
