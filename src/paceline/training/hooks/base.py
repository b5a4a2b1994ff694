"""`StepHook`: what is done around a training's steps. Read this first to add something there.

`paceline.training.setup` lists the hooks of a training.
"""

# ruff: noqa: B024, B027  # no method is abstract: those that aren't written do nothing

from abc import ABC
from collections.abc import Callable, Mapping
from typing import final

from torch import Tensor

from paceline.data.batch import Batch
from paceline.metrics.console import Communication
from paceline.results.metrics_table import EpochRow
from paceline.training.components import Components
from paceline.training.snapshots.train_state import TrainState
from paceline.training.status_exchange import Agreement


class StepHook(ABC):
    """Something that is done around a training's steps, beside forward, backward and update.

    Every method is called alike on all workers, in the order of the hooks, and may be collective
    where it says so. None has to be written: which ones a hook has is looked up once, so that what
    isn't written takes no time in a step.
    """

    def setup(
        self, components: Components, position: TrainState, saved: Mapping[str, object]
    ) -> None:
        """The training begins: models and optimizers are complete and restored. Collective.

        Args:
            components: Models, optimizers, loaders.
            position: Where the training stands; stays up to date.
            saved: What the hooks' `state_dict` gave for the snapshot that it is resumed from, among
                what else that holds as JSON; empty where there is none.
        """

    def begin_step(self, step: int, batch: Batch | None) -> None:
        """A batch is about to be given to the script, for its forward pass. Local to the worker.

        Args:
            step: Optimizer steps done.
            batch: The worker's share; a piece of it where it is cut up, each time with the same
                step. None in a loop without a training loader.
        """

    def before_backward(self, loss: Tensor, weight: float) -> None:
        """A backward pass of `loss * weight` is about to begin. Local to the worker."""

    def after_step(self, step: int) -> None:
        """A step is over, weights are updated; snapshots come after this. Collective.

        Args:
            step: Optimizer steps done.
        """

    def after_exchange(
        self, agreed: Agreement, steps: int, spent: Communication | None, top: int | None
    ) -> None:
        """The workers have exchanged their status, about once a second. Local to the worker.

        Args:
            agreed: What they know now, the same on each.
            steps: Steps since the exchange before.
            spent: What these steps spent on communication; None of a single worker.
            top: 5 or 1 where right guesses are counted.
        """

    def after_evaluation(self, metrics: Mapping[str, float], samples: int) -> None:
        """An evaluation over all workers is over; `metrics` are the same on each. Local."""

    def end_epoch(self, row: EpochRow) -> None:
        """An epoch is over; its snapshot comes after this. Collective."""

    def end_training(self, step: int) -> None:
        """The training is over, or a signal has stopped it; not after an error. Collective.

        Args:
            step: Optimizer steps done.
        """

    def state_dict(self) -> Mapping[str, object]:
        """Give what has to be in a snapshot, as JSON under names that are the hook's own. Local.

        Called on the workers that write snapshots, which have to give the same.
        """
        return {}


@final
class StepHooks:
    """The hooks of a training, by what they do: one list of methods for each moment."""

    def __init__(self) -> None:
        self.setup: list[Callable[[Components, TrainState, Mapping[str, object]], None]] = []
        self.begin_step: list[Callable[[int, Batch | None], None]] = []
        self.before_backward: list[Callable[[Tensor, float], None]] = []
        self.after_step: list[Callable[[int], None]] = []
        self.after_exchange: list[
            Callable[[Agreement, int, Communication | None, int | None], None]
        ] = []
        self.after_evaluation: list[Callable[[Mapping[str, float], int], None]] = []
        self.end_epoch: list[Callable[[EpochRow], None]] = []
        self.end_training: list[Callable[[int], None]] = []
        self.state_dict: list[Callable[[], Mapping[str, object]]] = []

    def add(self, hook: StepHook) -> None:
        """Add a hook behind those that there are."""
        for name, methods in vars(self).items():
            if overrides(hook, StepHook, name):
                methods.append(getattr(hook, name))


def overrides(instance: object, base: type, name: str) -> bool:
    """Tell whether an object's class has written a method that its base has only for a default."""
    return getattr(type(instance), name) is not getattr(base, name)
