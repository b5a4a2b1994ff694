"""`GradientSync`: how the workers' gradients are combined. Read this first to add a way of it.

What is there already stands in `paceline.gradient_sync.registry`, a row each. A class of this
kind is made from a `TrainingContext` before there are models, one on every worker.
"""

# ruff: noqa: B027  # hooks aren't abstract: those that aren't written do nothing

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from paceline.data.batch import Batch


@dataclass(frozen=True, kw_only=True)
class SyncState:
    """State of a `GradientSync` in a snapshot."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """On the CPU or the device. What is each worker's own has a first dimension of ranks."""
    values: Mapping[str, object] = field(default_factory=dict)
    """JSON; alike on all workers."""


class GradientSync(ABC):
    """Combines the workers' gradients.

    Every method is called alike on all workers, in the same order, and may be collective where it
    says so. `backward` has to be written; the others do nothing until they are. What isn't
    written takes no time in a step.
    """

    def setup(self, step: int) -> None:
        """Begin: models and optimizers are complete, and `load_state_dict` has been. Collective.

        Args:
            step: Optimizer steps done; more than 0 where a training is resumed.
        """

    def begin_step(self, step: int, batch: Batch | None) -> None:
        """A batch is about to be given to the script, as for `StepHook.begin_step`, before others.

        Local to the worker.
        """

    @abstractmethod
    def backward(self, loss: Tensor, batch: Batch | None, *, more: bool = False) -> None:
        """Run a backward pass. After the step's last one every parameter's `grad` is the gradient
        of the mean loss over the whole global batch. Collective then.

        Args:
            loss: Scalar, the mean over this worker's samples in the batch.
            batch: What it is about, whole or a piece; None where it isn't from the training loader.
            more: Another backward pass about the same batch will follow.

        Raises:
            UsageError: The script does what can't be combined with this way.
        """

    def after_step(self, step: int) -> None:
        """A step is over, weights are updated; snapshots come after this. Collective.

        Args:
            step: Optimizer steps done.
        """

    def state_dict(self) -> SyncState:
        """Collect all workers' state for a snapshot. Collective.

        It may be empty on workers that write none (`TrainingContext.writes`).
        """
        return SyncState()

    def load_state_dict(self, state: SyncState, world_size: int) -> str:
        """Take over what `state_dict` gave; before `setup`, and weights are restored. Collective.

        Args:
            state: Of a snapshot that this class wrote.
            world_size: Number of workers then.

        Returns:
            What the user should know, or nothing.
        """
        return ""

    def close(self) -> None:
        """The training is over, or has failed: end what was begun. Local to the worker."""
