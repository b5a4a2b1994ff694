"""What makes the workers' work one in other ways than each step's all-reduce."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import Tensor

from paceline.training.snapshots.per_worker_states import OwnState

ON_AVERAGE = (
    "Each worker had weights of its own where the snapshot was taken. These workers, or options of "
    "--sync, are others: all go on from the average"
)


@dataclass(frozen=True, kw_only=True)
class SyncState:
    """What a way of combining the workers' work has to remember, for a snapshot."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """On the CPU or the device. What is each worker's own has a first dimension of ranks."""
    values: Mapping[str, object] = field(default_factory=dict)
    """JSON; alike on all workers."""
    model: Mapping[str, Tensor] = field(default_factory=dict)
    """Where each worker has weights of its own: those that stand for all, by their names."""
    optimizers: Sequence[OwnState] = ()
    """Likewise of each optimizer: as `flatten_optimizer` gives it."""
    scaler: Mapping[str, object] | None = None
    """Likewise of the loss scaler."""


def were_apart(values: Mapping[str, object]) -> bool:
    """Tell by a snapshot's `SyncState.values` whether each worker had weights of its own."""
    inner = values.get("local", values)  # --sync auto puts them there
    return isinstance(inner, Mapping) and bool(inner.get("round"))


class StepSync(ABC):
    """Is told of every step. All is called alike on all workers, and may be collective."""

    @abstractmethod
    def begin(self, step: int) -> None:
        """Begin, or go on after `restore`; models and optimizers are complete.

        Args:
            step: Optimizer steps done.
        """

    @abstractmethod
    def begin_pass(self) -> None:
        """A pass over the training data begins, or what is left of it."""

    @abstractmethod
    def after_step(self, step: int) -> None:
        """A step is over, weights are updated; exchanges of news and snapshots come after this.

        Args:
            step: Optimizer steps done.
        """

    @abstractmethod
    def consensus(self) -> bool:
        """A pass over the training data is over: make all workers' weights the same.

        Returns:
            Whether there was anything to do.
        """

    @abstractmethod
    def lent(self) -> AbstractContextManager[None]:
        """Lend the models weights that stand for all workers', for an evaluation."""

    @abstractmethod
    def gathered(self) -> SyncState:
        """Collect all workers' state for a snapshot; on those that write none it may be empty."""

    @abstractmethod
    def restore(self, state: SyncState, world_size: int) -> str:
        """Take over what `gathered` gave, before `begin`; weights are restored already.

        Args:
            state: Of a snapshot that this method wrote.
            world_size: Number of workers then.

        Returns:
            What the user should know, or nothing.
        """

    @abstractmethod
    def release(self) -> None:
        """The training is over, or has failed: end what was begun. Local to the worker."""
