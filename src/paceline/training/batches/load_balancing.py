"""Shares each global batch by the workers' speed: the slowest then no longer sets the pace."""

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import final

import torch

from paceline.distributed.group import Group
from paceline.training.batches.loader import Loader
from paceline.training.batches.plan import TrainPlan

_FIRST_STEPS = 10
"""Measured before the first change; the very first step isn't, which warms up."""
_STEPS = 200
"""Measured before each later one."""
_LEAST_GAIN = 0.03
"""A change that promises less isn't made."""


@final
class SpeedMeter:
    """Times this worker's forward passes, in which it waits for nobody.

    On a GPU by events, so that the host doesn't wait either.
    """

    def __init__(self, device: torch.device) -> None:
        """Args:
        device: Where the passes run.
        """
        self._on_gpu = device.type == "cuda"
        self._started_s: float | None = None
        self._seconds = 0.0
        self._samples = self._steps = 0
        self._begin: torch.cuda.Event | None = None
        self._passes: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def begin(self) -> None:
        """Note that a forward pass begins."""
        self._started_s = perf_counter()
        if self._on_gpu:
            self._begin = torch.cuda.Event(enable_timing=True)
            self._begin.record()

    def end(self, samples: int) -> None:
        """Note that it has ended; a second time for the same pass changes nothing.

        Args:
            samples: What went through.
        """
        if self._started_s is None:
            return
        self._samples += samples
        self._seconds += perf_counter() - self._started_s
        self._started_s = None
        if self._begin is not None:
            done = torch.cuda.Event(enable_timing=True)
            done.record()
            self._passes.append((self._begin, done))

    def count_step(self) -> None:
        """Count a step, of however many passes: their number isn't the same on every worker."""
        self._steps += 1
        if self._steps == 1:
            self._seconds, self._samples, self._passes = 0.0, 0, []  # that one warmed up

    def is_due(self, is_balanced: bool) -> bool:
        """Tell whether enough has been measured; the same on every worker."""
        return self._steps > (_STEPS if is_balanced else _FIRST_STEPS)

    def speeds(self, group: Group) -> list[float]:
        """Give every worker's samples a second, and measure anew. Collective."""
        seconds = self._seconds
        if self._passes:
            torch.cuda.synchronize()
            seconds = sum(begin.elapsed_time(done) for begin, done in self._passes) / 1000
        own = self._samples / seconds if seconds > 0 else 0.0
        self._seconds, self._samples, self._steps, self._passes = 0.0, 0, 0, []
        return [float(v) for v in group.gather_rows(torch.tensor([own], dtype=torch.float64))[:, 0]]


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
    parts = [int(value) for value in exact]
    by_remainder = sorted(range(len(speeds)), key=lambda rank: (parts[rank] - exact[rank], rank))
    for rank in by_remainder[: spare - sum(parts)]:
        parts[rank] += 1
    return tuple(part + 1 for part in parts)


def rebalanced(
    plan: TrainPlan, meter: SpeedMeter, group: Group, max_batch: int | None
) -> TrainPlan | None:
    """Share a plan's batches anew where enough has been measured and it pays. Collective then.

    Args:
        plan: The present one.
        meter: This worker's.
        group: The workers.
        max_batch: Most samples that a worker puts through the model at once.
    """
    if not meter.is_due(plan.is_balanced):
        return None
    shares = better_shares(plan.batch_per_worker, meter.speeds(group))
    return None if shares is None else plan.balanced(shares, max_batch)


def rebalance(
    loader: Loader,
    meter: SpeedMeter,
    group: Group,
    max_batch: int | None,
    say: Callable[[str], None],
) -> bool:
    """Share a loader's batches anew where the workers' speeds say so. Collective then.

    Args:
        loader: Whose plan changes.
        meter: This worker's.
        group: The workers.
        max_batch: Most samples that a worker puts through the model at once.
        say: Tells the user, on rank 0.

    Returns:
        Whether they are.
    """
    plan = rebalanced(loader.plan, meter, group, max_batch)
    if plan is None:
        return False
    loader.plan = plan
    if group.rank == 0:
        say(f"Each global batch is now shared as {plan.shares}")
    return True


def better_shares(shares: Sequence[int], speeds: Sequence[float]) -> tuple[int, ...] | None:
    """Give shares that finish sooner than the present ones by a good deal; None if none do."""
    if not all(speed > 0 for speed in speeds):
        return None
    found = proportional(sum(shares), speeds)
    now_s = max(part / speed for part, speed in zip(shares, speeds, strict=True))
    then_s = max(part / speed for part, speed in zip(found, speeds, strict=True))
    return found if then_s < (1 - _LEAST_GAIN) * now_s else None
