"""When a failed training is started again: a pure decision."""

from dataclasses import dataclass, replace

from paceline.launch.failures import FailureKind, WorkerFailure
from paceline.launch.watchdog.hang_detector import HangLimits

STOP_S = 3.5
"""From a request to stop until workers are killed: time to agree on a step and write a snapshot."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What becomes of a training whose workers fail or hang."""

    max_restarts: int = 0
    """Restarts allowed in a row without progress."""
    hang: HangLimits | None = None
    """After how long it counts as hanging; None: nobody looks."""
    stop_s: float = STOP_S
    """From a request to stop until workers are killed."""


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
            is_hang: Whether the training hung.

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
