"""Puts the schedule's learning rate into the optimizer before each step."""

from collections.abc import Sequence
from typing import final

from torch import Tensor
from torch.optim import Optimizer

from paceline.data.batch import Batch
from paceline.optim.schedule import Schedule
from paceline.training.hooks.base import StepHook


@final
class LearningRateSchedule(StepHook):
    """Sets each parameter group's rate to its own base rate times the schedule's factor."""

    def __init__(self, optimizer: Optimizer, base_lrs: Sequence[float], schedule: Schedule) -> None:
        """Control an optimizer; its rates change with the first step.

        Args:
            base_lrs: The rate of each parameter group at factor 1. Take them when the optimizer
                is built: a restored optimizer carries the rates of the step it was saved at.

        Raises:
            ValueError: There isn't one base rate for each parameter group.
        """
        if len(base_lrs) != len(optimizer.param_groups):
            raise ValueError(
                f"{len(base_lrs)} base rates for {len(optimizer.param_groups)} parameter groups"
            )
        self.schedule = schedule
        """May be replaced while training (`Schedule.with_total_steps`); used from the next step."""
        self._optimizer = optimizer
        self._base_lrs = tuple(base_lrs)
        self._factor: float | None = None

    def begin_step(self, step: int, batch: Batch | None) -> None:
        """Set the rates for a step; does nothing when the factor is the one of the step before."""
        factor = self.schedule.factor(step)
        if factor == self._factor:
            return
        self._factor = factor
        for group, base_lr in zip(self._optimizer.param_groups, self._base_lrs, strict=True):
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(base_lr * factor)  # a captured graph reads this very tensor
            else:
                group["lr"] = base_lr * factor

    def lr_at(self, step: int) -> float:
        """Give the first parameter group's rate at a step, for showing it."""
        return self._base_lrs[0] * self.schedule.factor(step)
