"""Counts the steps of a loop without a training loader."""

from collections.abc import Iterable, Sequence
from typing import final

from torch.optim import Optimizer


@final
class FreeSteps:
    """Says when a step of such a loop is over.

    In a loop over `s.steps` that is when the next one is asked for. After `s.begin` it is when
    every optimizer has been updated; what is due then (a snapshot, the end on a signal) waits for
    the next backward pass, so that what the script does behind the update belongs to the step.
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, by_updates: bool) -> None:
        """Args:
        optimizers: All that there are.
        by_updates: Whether updates end a step.
        """
        self._optimizers = optimizers
        self._by_updates = by_updates
        self._updated: set[int] = set()
        self._is_due = False

    def is_over_with(self, updated: Iterable[Optimizer]) -> bool:
        """Note an update, and tell whether the step is over with it."""
        self._updated.update(map(id, updated))
        if not self._by_updates or len(self._updated) < len(self._optimizers):
            return False
        self._updated.clear()
        self._is_due = True
        return True

    def take_due(self) -> bool:
        """Tell whether a step has ended since the last call."""
        due, self._is_due = self._is_due, False
        return due
