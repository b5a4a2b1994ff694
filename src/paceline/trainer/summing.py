"""What the workers tell of their steps, and what it comes to. Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median, pstdev
from typing import Self

from paceline.config.profile import Spread, StepParts, WorkerTime
from paceline.trainer.pace import Lap, Pace

_LOW, _HIGH = 0.1, 0.9


@dataclass(frozen=True, kw_only=True)
class Told:
    """What one worker tells of its steps: seconds, medians over the steps it looked at."""

    host: str
    steps: int
    """That were looked at."""
    data_s: float = 0.0
    forward_s: float = 0.0
    backward_s: float = 0.0
    optimizer_s: float = 0.0
    other_s: float = 0.0
    total_s: float = 0.0
    compute_s: float = 0.0
    spread_s: float = 0.0
    """Standard deviation of `compute_s`."""
    waits_s: Mapping[str, float]
    """How long it waited for gradients, by step."""
    agreeing_s: float
    """A step's share of the exchanges between the workers."""
    averaging_s: float
    """A step's share of waiting for averages of weights."""
    syncing_s: float
    """A step's share of what else there is to do for averages."""

    def to_json(self) -> str:
        """Write it as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))


def told_of(pace: Pace, host: str, averaging_s: float, syncing_s: float) -> Told:
    """Say what a worker has to tell.

    Args:
        pace: What it has measured.
        host: Its name.
        averaging_s: Of a step: waiting for averages of weights.
        syncing_s: Of a step: what else there is to do for them.
    """
    laps, seen = pace.laps(), pace.looks()
    found = Told(
        host=host,
        steps=len(seen),
        waits_s={str(step): look.wait_s for step, look in seen.items()},
        agreeing_s=sum(lap.agreeing_s for lap in laps) / max(1, sum(lap.steps for lap in laps)),
        averaging_s=averaging_s,
        syncing_s=syncing_s,
    )
    looks = list(seen.values())
    if not looks:
        return found
    return replace(
        found,
        data_s=median(look.data_s for look in looks),
        forward_s=median(look.forward_s for look in looks),
        backward_s=median(look.backward_s for look in looks),
        optimizer_s=median(look.optimizer_s for look in looks),
        other_s=median(look.other_s for look in looks),
        total_s=median(look.total_s for look in looks),
        compute_s=median(look.compute_s for look in looks),
        spread_s=pstdev(look.compute_s for look in looks),
    )


def parts_of(told: Sequence[Told], step_s: float) -> StepParts:
    """Share a step out, so that its parts together are the step.

    The times of single steps are medians, and a whole step's is a mean over many: what a busy
    machine adds to the mean is shared out among all parts alike.

    In a step whose gradients are exchanged all workers are through at the same time. So the one
    that waited least was the slowest, and its wait is the communication's; what the others waited
    longer, they waited for it.

    Args:
        told: By every worker.
        step_s: The whole step.
    """
    common = set(told[0].waits_s).intersection(*(each.waits_s for each in told[1:]))
    waits = [[each.waits_s[step] for each in told] for step in common]
    exposed = median(min(step) for step in waits) if waits else 0.0
    waiting = median(fmean(step) - min(step) for step in waits) if waits else 0.0
    averaging, agreeing = [e.averaging_s for e in told], [e.agreeing_s for e in told]
    exposed += min(averaging)
    waiting += fmean(averaging) - min(averaging) + fmean(agreeing) - min(agreeing)
    found = [
        fmean(each.data_s for each in told),
        fmean(each.forward_s for each in told),
        fmean(each.backward_s for each in told),
        exposed,
        waiting,
        fmean(each.optimizer_s for each in told),
        fmean(each.other_s + each.syncing_s for each in told) + min(agreeing),
    ]
    scale = step_s / (sum(found) or 1.0)
    data, forward, backward, exposed, waiting, optimizer, other = (p * scale for p in found)
    return StepParts(
        data=data,
        forward=forward,
        backward=backward,
        exposed=exposed,
        waiting=waiting,
        optimizer=optimizer,
        other=other,
    )


def workers_of(told: Sequence[Told]) -> tuple[WorkerTime, ...]:
    """List what each worker computes by itself."""
    return tuple(
        WorkerTime(rank=rank, host=each.host, compute_s=each.compute_s, spread_s=each.spread_s)
        for rank, each in enumerate(told)
    )


def step_of(told: Told) -> Spread:
    """Take the steps that were looked at for all, where there was no other."""
    return Spread(median=told.total_s, low=told.total_s, high=told.total_s)


def spread_of(laps: Sequence[Lap], *, by_mean: bool = False) -> Spread | None:
    """Give the time of a step, each lap counting as often as it has steps; None without laps.

    Args:
        laps: Of the training.
        by_mean: Take the mean for the figure in the middle: where workers average every few steps
            the median is a step in which none waits.
    """
    if not laps:
        return None
    paces = sorted((lap.seconds / lap.steps, lap.steps) for lap in laps)
    total = sum(steps for _, steps in paces)

    def at(share: float) -> float:
        passed = 0
        for step_s, steps in paces:
            passed += steps
            if passed >= share * total:
                return step_s
        return paces[-1][0]

    middle = sum(lap.seconds for lap in laps) / total if by_mean else at(0.5)
    return Spread(median=middle, low=min(at(_LOW), middle), high=max(at(_HIGH), middle))
