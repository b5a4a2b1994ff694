"""When a failed training is started again, and how long one that is to stop may take: pure."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from paceline.launch.errors.failures import FailureKind, WorkerFailure
from paceline.launch.heartbeat import Reading
from paceline.launch.watchdog.hang_detector import HangLimits

STOP_S = 3.5
"""From a request to stop until workers are killed, at least."""
MAX_STOP_S = 120.0
"""And at most, however long steps and snapshots take."""


@dataclass(frozen=True, kw_only=True)
class StopGrace:
    """How long workers have from a request to stop until they are killed."""

    least_s: float = STOP_S
    most_s: float = MAX_STOP_S

    def for_workers(self, workers: Iterable[Reading], *, is_late: bool = False) -> float:
        """Compute it from what the workers need.

        Args:
            is_late: Whether what this gave before is over: one that is writing a snapshot by then
                has all the time that there is.
        """
        needed = [
            math.inf if is_late and worker.operation == "snapshot" else worker.stop_s
            for worker in workers
        ]
        return min(self.most_s, max([self.least_s, *needed]))


def stopping_line(seconds: float, *, is_late: bool = False) -> str:
    """Tell the user what a stop waits for, and for how long.

    Args:
        seconds: From now on, at most.
        is_late: Whether more time is given than was said before.
    """
    doing = "Still writing a snapshot" if is_late else "Finishing the step and writing a snapshot"
    return f"{doing}, up to {math.ceil(seconds)} s; Ctrl-C again stops at once"


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What becomes of a training whose workers fail or hang."""

    max_restarts: int = 0
    """Restarts allowed in a row without progress."""
    hang: HangLimits | None = None
    """After how long it counts as hanging; None: no watchdog."""
    stop: StopGrace = field(default_factory=StopGrace)


@dataclass(frozen=True, kw_only=True)
class RestartBudget:
    """How many restarts are left, and the progress at which they were last refilled."""

    max_restarts: int
    """Restarts allowed in a row without progress."""
    left: int
    progress: int
    """Step of the newest good snapshot when last looked; -1 for none."""
    hangs: int = 0
    """How many of the restarts so far followed a hang rather than a crash."""

    @staticmethod
    def full(max_restarts: int, progress: int) -> "RestartBudget":
        """Start with all restarts left."""
        return RestartBudget(max_restarts=max_restarts, left=max_restarts, progress=progress)

    def after(self, cause: WorkerFailure, progress: int) -> "RestartBudget | None":
        """Decide after workers failed; as `spend`, which see, by the root cause."""
        if not cause.worth_restart:
            return None
        return self.spend(cause.kind, progress, is_hang=cause.is_hang)

    def spend(
        self, kind: FailureKind, progress: int, *, is_hang: bool = False
    ) -> "RestartBudget | None":
        """Decide after a failure.

        Args:
            kind: The root cause's kind; only an infrastructure failure is worth a retry.
            progress: Step of the newest good snapshot now; growth refills the budget.

        Returns:
            The budget for going on, or None: don't restart.
        """
        if kind != "infrastructure":
            return None
        # Progress since the last look refills the budget: only failures in a row count.
        grown = progress > self.progress
        left = self.max_restarts if grown else self.left
        if left <= 0:
            return None
        return replace(
            self,
            left=left - 1,
            progress=max(progress, self.progress),
            hangs=self.hangs + is_hang,
        )
