"""`--balance`: gives slower workers fewer samples of each batch, so that none waits long."""

from collections.abc import Callable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from paceline.data.batch import Batch
from paceline.distributed.device import is_accelerator
from paceline.distributed.group import Group
from paceline.training.batches.loader import Loader
from paceline.training.components import Components
from paceline.training.hooks.base import StepHook
from paceline.training.profiling.step_timeline import Moment, now, seconds_within
from paceline.training.progress import TrainingProgress
from paceline.training.snapshots.train_state import TrainState

_FIRST_STEPS = 10
"""Measured before the first change; the very first step isn't, which warms up."""
_STEPS = 200
"""Measured before each later one."""
_MIN_GAIN = 0.03
"""A change that promises less isn't made."""


@final
class LoadBalancer(StepHook):
    """Measures each worker's speed by its forward passes (free of waits), and splits batches by it.

    On a GPU it is done by events, so that the host doesn't wait either.
    """

    def __init__(
        self,
        progress: TrainingProgress,
        group: Group,
        max_batch: int | None,
        say: Callable[[str], None],
    ) -> None:
        """Args:
        progress: Whose plan changes with the loader's.
        group: The workers.
        max_batch: Most samples that a worker puts through the model at once.
        say: Tells the user, on rank 0.
        """
        self._loader: Loader | None = None
        self._progress = progress
        self._group = group
        self._max_batch = max_batch
        self._say = say
        self._on_gpu = is_accelerator(group.device)
        self._under_way = 0
        """Samples of the forward pass under way."""
        self._samples = self._steps = 0
        self._begin: Moment | None = None
        self._passes: list[tuple[Moment, Moment]] = []

    def setup(
        self, components: Components, position: TrainState, saved: Mapping[str, object]
    ) -> None:
        """Take the training loader, whose steps are counted."""
        self._loader = components.train_loader

    def begin_step(self, step: int, batch: Batch | None) -> None:
        """Note that a forward pass begins."""
        self._under_way = 0 if batch is None else batch.local
        self._begin = None if self._loader is None else now(on_gpu=self._on_gpu)

    def before_backward(self, loss: Tensor, weight: float) -> None:
        """Note that it has ended; a second time for the same pass changes nothing."""
        if self._begin is None:
            return
        self._samples += self._under_way
        self._passes.append((self._begin, now(on_gpu=self._on_gpu)))
        self._begin = None

    def after_step(self, step: int) -> None:
        """Count the step; where enough has been measured and it pays, share batches anew."""
        # Steps, not passes: their number isn't the same on every worker.
        self._steps += 1
        self._begin = None
        if self._steps == 1:
            self._samples, self._passes = 0, []  # that one warmed up
        loader = self._loader
        if loader is None or self._steps <= (_STEPS if loader.plan.is_balanced else _FIRST_STEPS):
            return
        shares = better_shares(loader.plan.batch_per_worker, self._speeds())
        if shares is not None:
            loader.plan = self._progress.plan = loader.plan.balanced(shares, self._max_batch)
            if self._group.rank == 0:
                self._say(f"Each global batch is now shared as {loader.plan.shares}")

    def _speeds(self) -> list[float]:
        """Give every worker's samples a second, and measure anew. Collective."""
        seconds = seconds_within(self._passes)
        own = torch.tensor([self._samples / seconds if seconds > 0 else 0.0], dtype=torch.float64)
        self._samples, self._steps, self._passes = 0, 0, []
        return [float(speed) for speed in self._group.gather_rows(own)[:, 0]]


def proportional(total: int, speeds: Sequence[float]) -> tuple[int, ...]:
    """Share samples in proportion to speeds: at least one each, the rest by largest remainder.

    Args:
        total: At least as many as there are speeds.
        speeds: Samples a second by rank; where one isn't known, all count as equal.
    """
    if not all(speed > 0 for speed in speeds):
        speeds = [1.0] * len(speeds)
    spare = total - len(speeds)
    exact = [spare * speed / sum(speeds) for speed in speeds]
    counts = [int(value) for value in exact]
    by_remainder = sorted(range(len(speeds)), key=lambda rank: (counts[rank] - exact[rank], rank))
    for rank in by_remainder[: spare - sum(counts)]:
        counts[rank] += 1
    return tuple(count + 1 for count in counts)


def better_shares(shares: Sequence[int], speeds: Sequence[float]) -> tuple[int, ...] | None:
    """Give shares that finish sooner than the present ones by a good deal; None if none do."""
    if not all(speed > 0 for speed in speeds):
        return None
    proposed = proportional(sum(shares), speeds)
    now_s = max(count / speed for count, speed in zip(shares, speeds, strict=True))
    then_s = max(count / speed for count, speed in zip(proposed, speeds, strict=True))
    return proposed if then_s < (1 - _MIN_GAIN) * now_s else None
