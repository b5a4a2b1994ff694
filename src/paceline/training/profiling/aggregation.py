"""Combines the workers' step times into one profile. Pure functions."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median, pstdev
from typing import Self

from paceline.results.profile import Spread, StepParts, WorkerTime
from paceline.training.profiling.step_profiler import Lap, StepProfiler

_LOW, _HIGH = 0.1, 0.9
_LAPS = 256
"""The newest, which a worker sends to the others."""
_MEDIANS = ("data_s", "forward_s", "backward_s", "optimizer_s", "other_s", "total_s", "compute_s")
"""Figures of `WorkerTimes` that are medians of the sampled steps'."""


@dataclass(frozen=True, kw_only=True)
class WorkerTimes:
    """One worker's step times: medians in seconds over the steps that it sampled.

    Flat, since it travels as one JSON object and each field is one figure of the report.
    """

    host: str
    steps: int
    """That were sampled."""
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
    agreements_s: Mapping[str, float]
    """What exchanges between the workers took, by steps done."""
    agreement_steps: int
    """Steps that these exchanges are of."""
    lap_data_s: float | None = None
    """How long it waited for a batch in steps between exchanges, of which each is timed; None
    where no such were."""

    def to_json(self) -> str:
        """Write it as JSON text."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what `to_json` wrote."""
        return cls(**json.loads(text))


def measure_worker(step_profiler: StepProfiler, host: str) -> WorkerTimes:
    """Collect this worker's step times."""
    laps, seen = step_profiler.laps()[-_LAPS:], step_profiler.samples()
    samples = list(seen.values())
    medians = {
        name: median(getattr(sample, name) for sample in samples) for name in _MEDIANS if samples
    }
    return WorkerTimes(
        host=host,
        steps=len(seen),
        **medians,
        spread_s=pstdev(sample.compute_s for sample in samples) if samples else 0.0,
        waits_s={str(step): sample.wait_s for step, sample in seen.items()},
        agreements_s={str(lap.until): lap.agreeing_s for lap in laps if lap.agreeing_s > 0},
        agreement_steps=max(1, sum(lap.steps for lap in laps)),
        lap_data_s=_usual_wait(laps),
    )


def parts_of(workers: Sequence[WorkerTimes], step_s: float) -> StepParts:
    """Divide a step's time into parts that add up to it.

    The times of single steps are medians, and a whole step's is a mean over many: what a busy
    machine adds to the mean is shared out among all parts alike. But waits for batches are known
    of all steps: reader processes may have theirs ready at once, so that one step waits for all of
    them, and the median of single steps says nothing.

    In a step whose gradients are exchanged all workers are through at the same time. So the one
    that waited least was the slowest, and its wait is the communication's; what the others waited
    longer, they waited for it. So it is with status exchanges, which don't come in each step: they
    are shared out among the steps, and each counts as the usual one does, since the first ones, and
    some on a busy machine, take many times as long.
    """
    # Waits for gradients, of the steps that all workers have sampled.
    common = set(workers[0].waits_s).intersection(*(each.waits_s for each in workers[1:]))
    waits = [[each.waits_s[step] for each in workers] for step in common]
    exposed = median(min(step) for step in waits) if waits else 0.0
    waiting = median(fmean(step) - min(step) for step in waits) if waits else 0.0
    # Waits for status exchanges, shared out among the steps.
    agreements = _apart([each.agreements_s for each in workers])
    often = len(agreements) / workers[0].agreement_steps
    agreeing_s = often * _median(least for least, _ in agreements)
    waiting += often * _median(more for _, more in agreements)
    # All parts, stretched alike until they are the whole step; waits that are known stay.
    seconds = {
        "data": fmean(each.data_s for each in workers),
        "forward": fmean(each.forward_s for each in workers),
        "backward": fmean(each.backward_s for each in workers),
        "exposed": exposed,
        "waiting": waiting,
        "optimizer": fmean(each.optimizer_s for each in workers),
        "other": fmean(each.other_s for each in workers) + agreeing_s,
    }
    waited = [each.lap_data_s for each in workers if each.lap_data_s is not None]
    data_s = 0.0
    if len(waited) == len(workers):
        seconds["data"], data_s = 0.0, min(fmean(waited), step_s)
    scale = (step_s - data_s) / (sum(seconds.values()) or 1.0)
    parts = StepParts(**{part: part_s * scale for part, part_s in seconds.items()})
    return replace(parts, data=parts.data + data_s)


def _usual_wait(laps: Sequence[Lap]) -> float | None:
    """Give what a step waits for its batch, each lap counting as often as it has steps."""
    waits = [(lap.data_s / lap.steps, lap.steps) for lap in laps if lap.data_s is not None]
    return _quantile(sorted(waits), 0.5) if waits else None


def _apart(waits_s: Sequence[Mapping[str, float]]) -> list[tuple[float, float]]:
    """Tell what all workers waited from what they waited longer, on average, for the slowest.

    Args:
        waits_s: Of each worker, by step; where one has none, it didn't wait.

    Returns:
        Both, for each step that has a wait.
    """
    averaged = {step for each in waits_s for step in each}
    of_each = [[each.get(step, 0.0) for each in waits_s] for step in averaged]
    return [(min(step), fmean(step) - min(step)) for step in of_each]


def _median(values: Iterable[float]) -> float:
    listed = list(values)
    return median(listed) if listed else 0.0


def workers_of(workers: Sequence[WorkerTimes]) -> tuple[WorkerTime, ...]:
    """List what each worker computes by itself."""
    return tuple(
        WorkerTime(rank=rank, host=each.host, compute_s=each.compute_s, spread_s=each.spread_s)
        for rank, each in enumerate(workers)
    )


def step_of(worker: WorkerTimes) -> Spread:
    """Take the steps that were sampled for all, where there was no other."""
    return Spread(median=worker.total_s, low=worker.total_s, high=worker.total_s)


def spread_of(laps: Sequence[Lap]) -> Spread | None:
    """Return the time of a step, each lap counting as often as it has steps; None without laps."""
    if not laps:
        return None
    step_times = sorted((lap.seconds / lap.steps, lap.steps) for lap in laps)
    low, middle, high = (_quantile(step_times, share) for share in (_LOW, 0.5, _HIGH))
    return Spread(median=middle, low=low, high=high)


def _quantile(times: Sequence[tuple[float, int]], share: float) -> float:
    """Give a quantile of sorted times of steps, each with how many steps took it."""
    total, passed = sum(steps for _, steps in times), 0
    for step_s, steps in times:
        passed += steps
        if passed >= share * total:
            return step_s
    return times[-1][0]
