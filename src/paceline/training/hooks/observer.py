"""What observes a training from inside its process: `paceline verify` does."""

from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor, nn

from paceline.data.batch import Batch


class TrainingObserver(Protocol):
    """Sees one worker's training, and may end its epochs early. Nothing in it is collective."""

    def begin(self, models: Mapping[str, nn.Module]) -> None:
        """The training begins: models are complete and restored."""

    def epoch(self, number: int, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches of an epoch, or only the first of them, the same on every worker."""
        ...

    def batch(self, epoch: int, batch: Batch) -> None:
        """A batch, or a piece of it, is about to be given to the script. May end the training."""

    def backward(self, loss: Tensor, weight: float) -> None:
        """A backward pass of `loss * weight` is about to begin."""

    def evaluated(self, metrics: Mapping[str, float], samples: int) -> None:
        """An evaluation over all workers is over; `metrics` are the same on each."""


OBSERVER: ContextVar[TrainingObserver | None] = ContextVar("observer", default=None)
"""Of the trainings that this process begins."""
