"""How fast each worker is, where its time goes, and who keeps the others waiting."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Literal, final

from paceline.launch.watchdog.worker_state import WorkerState
from paceline.options.figures import show_time

_POLLS = 10
"""Polls, about a second apart, over which speeds are taken."""
_MIN_STEPS = 5
_MARKED = 1.5
"""A straggler needs so many times as long by itself as the median worker,"""
_OF_STEP = 0.2
"""and longer by this part of a step."""
_STEADY_POLLS = 20
"""A worker is named once it was a straggler in so many polls in a row: on a machine that does other
things as well it is now this worker and now that, and none of them is to blame."""
_AGAIN_AFTER_POLLS = 60


@dataclass(frozen=True, kw_only=True)
class WorkerSpeed:
    """A worker's usual step of late; of a GPU, by its own clock."""

    rank: int
    host: str
    step_s: float
    """Time from one step to the next, the same for all workers; of which"""
    compute_s: float
    """it computes itself,"""
    waiting_s: float
    """it waits for other workers,"""
    data_s: float
    """it waits for data."""

    @property
    def own_s(self) -> float:
        """The time that this worker would need without the others."""
        return self.compute_s + self.data_s


@dataclass(frozen=True)
class Straggler:
    """A worker that keeps the others waiting."""

    speed: WorkerSpeed
    usual_s: float
    """What the median worker needs for itself."""
    cause: Literal["compute", "data"]

    def line(self) -> str:
        """Describe it in a line."""
        speed = self.speed
        what = "waits long for its data" if self.cause == "data" else "computes slowly"
        return (
            f"rank {speed.rank} on {speed.host} {what} and keeps the other workers waiting: "
            f"{show_time(speed.own_s)} a step for itself (computing {show_time(speed.compute_s)}, "
            f"data {show_time(speed.data_s)}), the median worker needs {show_time(self.usual_s)}"
        )


@final
class Speeds:
    """Speeds of the workers of one attempt, over the last ten seconds."""

    def __init__(self) -> None:
        self._seen: deque[Mapping[int, WorkerState]] = deque(maxlen=_POLLS + 1)
        self._polls = 0
        self._in_a_row: dict[int, int] = {}
        """Of those that were stragglers at the last poll: at how many before it without a break."""
        self._named: dict[int, int] = {}

    def update(self, states: Sequence[WorkerState]) -> list[WorkerSpeed]:
        """Add an observation, and give every worker's speed, the slowest first.

        Args:
            states: Of the workers that can be seen; about a second after those before.

        Returns:
            Of those that have finished steps since.
        """
        self._polls += 1
        self._seen.append({state.rank: state for state in states})
        speeds = []
        for state in states:
            # Sums over the whole window: differences of two polls would be coarse.
            first = next((seen[state.rank] for seen in self._seen if state.rank in seen), state)
            if state.reading.steps > first.reading.steps and state.reading.step is not None:
                speeds.append(_speed(first, state))
        return sorted(speeds, key=lambda speed: (-speed.own_s, speed.rank))

    def stragglers(self, speeds: Sequence[WorkerSpeed]) -> list[Straggler]:
        """Give those that have been stragglers for half a minute, each once a minute at most.

        Args:
            speeds: What the last `update` gave; called once after each.
        """
        slow = find_stragglers(speeds) if self._can_compare() else []
        self._in_a_row = {
            each.speed.rank: self._in_a_row.get(each.speed.rank, 0) + 1 for each in slow
        }
        due = [each for each in slow if self._is_due(each.speed.rank)]
        self._named |= {each.speed.rank: self._polls for each in due}
        return due

    def _can_compare(self) -> bool:
        """Tell whether the window is full, and every worker has done some steps in it."""
        if len(self._seen) <= _POLLS:
            return False
        first, last = self._seen[0], self._seen[-1]
        counted = [
            last[rank].reading.steps - first[rank].reading.steps for rank in last if rank in first
        ]
        return min(counted, default=0) >= _MIN_STEPS

    def _is_due(self, rank: int) -> bool:
        """Tell whether a straggler has been one for long, and wasn't named of late."""
        named = self._named.get(rank, -_AGAIN_AFTER_POLLS)
        return self._in_a_row[rank] >= _STEADY_POLLS and self._polls - named >= _AGAIN_AFTER_POLLS


def find_stragglers(speeds: Sequence[WorkerSpeed]) -> list[Straggler]:
    """Find the workers that keep the others waiting: pure."""
    if len(speeds) < 2:
        return []
    # The low median, so that with two workers the faster one is the measure. The cause is the part
    # that exceeds its own median by more.
    usual_s = median_low([speed.own_s for speed in speeds])
    computes_s = median_low([speed.compute_s for speed in speeds])
    reads_s = median_low([speed.data_s for speed in speeds])
    return [
        Straggler(
            speed,
            usual_s,
            "data" if speed.data_s - reads_s > speed.compute_s - computes_s else "compute",
        )
        for speed in speeds
        if speed.own_s > _MARKED * usual_s and speed.own_s - usual_s > _OF_STEP * speed.step_s
    ]


def _speed(first: WorkerState, last: WorkerState) -> WorkerSpeed:
    before, after = first.reading, last.reading
    steps = after.steps - before.steps
    step_s = max(0.0, after.total_s - before.total_s) / steps
    data_s = min(step_s, (after.data_s - before.data_s) / steps)
    # One step in each half second stands for the others: it may have waited longer than they.
    waiting_s = min(step_s - data_s, (after.waiting_s - before.waiting_s) / steps)
    return WorkerSpeed(
        rank=last.rank,
        host=last.host,
        step_s=step_s,
        compute_s=step_s - data_s - waiting_s,
        waiting_s=waiting_s,
        data_s=data_s,
    )
