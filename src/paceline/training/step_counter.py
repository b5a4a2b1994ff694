"""By what a training's steps are counted."""

from collections.abc import Iterable, Sequence
from typing import Literal, final

from torch.optim import Optimizer

CountedBy = Literal["batches", "turns", "updates"]
"""Batches of the training loader; without one, turns of a loop over `s.steps`, or updates after
`s.begin`."""


@final
class StepCounter:
    """Says when a step is over.

    In a loop over `s.steps` that is when the next one is asked for. After `s.begin` it is when
    every optimizer has been updated; what is due then (a snapshot, the end on a signal) waits for
    the next backward pass, so that what the script does behind the update belongs to the step.
    """

    def __init__(self, by: CountedBy = "batches", optimizers: Sequence[Optimizer] = ()) -> None:
        """Args:
        by: What ends a step.
        optimizers: All that there are.
        """
        self.by = by
        self._optimizers = optimizers
        self._updated: set[int] = set()
        self._is_due = False

    def is_over_with(self, updated: Iterable[Optimizer]) -> bool:
        """Note an update, and tell whether the step is over with it."""
        self._updated.update(map(id, updated))
        if self.by != "updates" or len(self._updated) < len(self._optimizers):
            return False
        self._updated.clear()
        self._is_due = True
        return True

    def take_due(self) -> bool:
        """Tell whether a step has ended since the last call."""
        due, self._is_due = self._is_due, False
        return due
