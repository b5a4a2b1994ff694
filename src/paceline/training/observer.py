"""What an observer of a training is told; `paceline verify` is one."""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.data.batch import Batch
from paceline.training.evaluation.distributed_mean import Figures


class Watcher(Protocol):
    """Is told about every step of a worker. It must change nothing and communicate with nobody."""

    def begin(self, models: Mapping[str, nn.Module], optimizers: Sequence[Optimizer]) -> None:
        """The training begins, from these weights."""

    def batch(self, batch: Batch, epoch: int, step: int) -> None:
        """A batch is about to be given to the script; several in a step where it is cut up."""

    def loss(self, loss: Tensor, weight: float) -> None:
        """A backward pass is about to begin, of `loss * weight`."""

    def evaluated(self, figures: Figures, samples: int) -> None:
        """An evaluation over all workers has ended."""


WATCHER: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
"""The observer of the trainings that this process begins."""
