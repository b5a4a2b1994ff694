"""The learning rate: scaled to the batch; schedules as closed forms of the step.

Schedules have nothing to save and nothing to restore.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from paceline.errors import UsageError
from paceline.optim.options import OptimOptions, ScheduleName, schedule_arguments

# Smith and Topin 2018, arXiv:1708.07120; the numbers are OneCycleLR's defaults.
_ONE_CYCLE_RISING = 0.3
_ONE_CYCLE_FIRST = 1.0 / 25.0
_ONE_CYCLE_LAST = _ONE_CYCLE_FIRST / 1e4


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


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The factor of the learning rate at each step: warm-up times the schedule's shape."""

    kind: ScheduleName
    total_steps: int
    """Optimizer steps of the whole training, warm-up included."""
    steps_per_epoch: int
    warmup_steps: int = 0
    warmup_start: float = 0.0
    """Factor at step 0 of the warm-up; it is 1 from step `warmup_steps` on."""
    step_epochs: int = 30
    step_factor: float = 0.1
    final_lr_factor: float = 0.0

    def factor(self, step: int) -> float:
        """Give what the base rate is multiplied with for a step.

        Args:
            step: Optimizer steps finished so far: 0 for the first one. From `total_steps` on
                cosine and one-cycle stay at their last value.
        """
        shape = _SHAPES[self.kind](self, step)
        if step >= self.warmup_steps:
            return shape
        # Goyal et al. 2017, arXiv:1706.02677, §2.2
        return shape * (self.warmup_start + (1.0 - self.warmup_start) * step / self.warmup_steps)

    def with_total_steps(self, total_steps: int) -> "Schedule":
        """Fit the schedule to another length, for example to what a time budget allows.

        The warm-up keeps its length; the constant and step schedules don't depend on the total.

        Args:
            total_steps: The new total, at least 1, counted from the start of the training.
        """
        return replace(self, total_steps=max(1, total_steps))


def build_schedule(options: OptimOptions, *, total_steps: int, steps_per_epoch: int) -> Schedule:
    """Make the schedule of a training.

    Args:
        options: Schedule and warm-up as the user gave them.

    Raises:
        UsageError: The warm-up is longer than the training.
    """
    warmup_steps = options.warmup_steps or round(options.warmup_epochs * steps_per_epoch)
    if warmup_steps > total_steps:
        raise UsageError(
            f"the warm-up of {warmup_steps} steps is longer than the training of {total_steps} "
            "steps; shorten it with --warmup-epochs or --warmup-steps, or train for more epochs"
        )
    own = schedule_arguments(options)
    return Schedule(
        kind=options.schedule,
        total_steps=max(1, total_steps),
        steps_per_epoch=max(1, steps_per_epoch),
        warmup_steps=warmup_steps,
        warmup_start=options.warmup_start or 0.0,
        step_epochs=int(own.get("step_epochs", 30)),
        step_factor=own.get("step_factor", 0.1),
        final_lr_factor=own.get("final_lr_factor", 0.0),
    )


def _constant(schedule: Schedule, step: int) -> float:
    return 1.0


def _step(schedule: Schedule, step: int) -> float:
    drops = step // schedule.steps_per_epoch // schedule.step_epochs
    return float(schedule.step_factor**drops)


def _cosine(schedule: Schedule, step: int) -> float:
    # Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5 without restarts
    length = max(1, schedule.total_steps - schedule.warmup_steps)
    done = min(max(step - schedule.warmup_steps, 0) / length, 1.0)
    return _half_cosine(1.0, schedule.final_lr_factor, done)


def _one_cycle(schedule: Schedule, step: int) -> float:
    # Two half cosines as in torch's OneCycleLR: up to the step `top`, and down to the last step.
    top = _ONE_CYCLE_RISING * schedule.total_steps - 1.0
    if step <= top:
        return _half_cosine(_ONE_CYCLE_FIRST, 1.0, step / top)
    done = (step - top) / (schedule.total_steps - 1 - top)
    return _half_cosine(1.0, _ONE_CYCLE_LAST, min(done, 1.0))


def _half_cosine(start: float, end: float, done: float) -> float:
    """Go from `start` to `end` as `done` goes from 0 to 1."""
    return end + (start - end) / 2.0 * (1.0 + math.cos(math.pi * done))


_SHAPES: Mapping[ScheduleName, Callable[[Schedule, int], float]] = {
    "constant": _constant,
    "step": _step,
    "cosine": _cosine,
    "one-cycle": _one_cycle,
}
