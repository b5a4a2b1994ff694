"""The learning rate: scaled to the global batch, and put into the optimizer before each step."""

import math
from collections.abc import Sequence
from typing import final

from torch import Tensor
from torch.optim import Optimizer

from paceline.optim.options import OptimOptions
from paceline.optim.schedule import Schedule


def scaled_lr(options: OptimOptions, global_batch: int) -> tuple[float, str]:
    """Scale the learning rate to the global batch.

    Linear keeps the expected change per sample (Goyal et al. 2017, arXiv:1706.02677, §2.1), the
    square root keeps the variance of the gradient's noise (Krizhevsky 2014, arXiv:1404.5997, §5).

    Args:
        options: `lr`, `lr_scaling` and `base_batch` are read; they were checked when made.
        global_batch: Samples in one optimizer step over all workers together.

    Returns:
        The rate, and one line for the user such as
        `lr 0.4 = 0.1 x 256/64 (linear, base batch 64)`.
    """
    if options.base_batch is None:
        return options.lr, f"lr {options.lr:.6g} (not scaled with the batch)"
    base = options.base_batch
    ratio = global_batch / base
    if options.lr_scaling == "linear":
        lr, formula = options.lr * ratio, f"{global_batch}/{base}"
    else:
        lr, formula = options.lr * math.sqrt(ratio), f"sqrt({global_batch}/{base})"
    rule = f"({options.lr_scaling}, base batch {base})"
    return lr, f"lr {lr:.6g} = {options.lr:.6g} x {formula} {rule}"


@final
class RateControl:
    """Sets each parameter group's rate to its own base rate times the schedule's factor."""

    def __init__(self, optimizer: Optimizer, base_lrs: Sequence[float], schedule: Schedule) -> None:
        """Control an optimizer; its rates change at the first `apply`.

        Args:
            optimizer: The optimizer that trains.
            base_lrs: The rate of each parameter group at factor 1. Take them when the optimizer
                is built: a restored optimizer carries the rates of the step it was saved at.
            schedule: Gives the factor.

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

    def apply(self, step: int) -> None:
        """Set the rates for a step; does nothing when the factor is the one of the step before.

        Args:
            step: Optimizer steps finished so far.
        """
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
