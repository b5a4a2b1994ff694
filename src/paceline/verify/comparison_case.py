"""What the search for causes works on: a launch beside the first one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

from paceline.verify.compare import Comparison, StepDifference
from paceline.verify.finding import Cause, Finding
from paceline.verify.trace import Pass, Step, Trace


@final
@dataclass(frozen=True, kw_only=True)
class Case:
    """One number of workers, to be explained."""

    first: Trace
    other: Trace
    comparison: Comparison
    beyond: StepDifference | None
    """The first step in which more than rounding stands between the two."""

    @property
    def workers(self) -> int:
        """How many there are in the launch that is to be explained."""
        return self.other.workers

    def found(
        self,
        cause: Cause,
        what: str,
        *,
        step: int | None = None,
        rank: int | None = None,
        tensor: str = "",
    ) -> Finding:
        """Make a finding of this launch."""
        return Finding(
            cause=cause, workers=self.workers, what=what, step=step, rank=rank, tensor=tensor
        )

    def first_steps(self) -> tuple[Step, Step] | None:
        """Give the first step of both, where both have one."""
        if not self.first.steps or not self.other.steps:
            return None
        return self.first.steps[0], self.other.steps[0]

    def whole_passes(self) -> tuple[Pass, Pass] | None:
        """Give the first epoch of both, where both were seen to their end."""
        mine, theirs = self.first.training(), self.other.training()
        if mine and theirs and mine[0].is_whole and theirs[0].is_whole:
            return mine[0], theirs[0]
        return None


Detector = Callable[[Case], Iterator[Finding]]
"""Looks for one cause."""
