"""Whether a training hangs, and who is missing: a pure decision from the workers' states."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from paceline.launch.heartbeat import DEVICE_WAIT, STEPPING
from paceline.launch.watchdog.worker_state import WorkerState

MIN_S = 30.0
COMPILING_MIN_S = 120.0
"""With compilation: a new shape of a batch compiles anew, which may take a minute."""
_TIMES = 10.0
_OF_TIMEOUT = 0.9
_MISMATCH_S = 10.0
"""For workers that wait in different collectives: no slow step or network explains that, so this is
for the seconds that lie between the states of several hosts."""
_BUSY, _IDLE = 0.5, 0.1
"""Cores that a process keeps busy which computes, and one that waits."""


@dataclass(frozen=True, kw_only=True)
class HangLimits:
    """After how long a training that doesn't go on counts as hanging."""

    least_s: float = MIN_S
    """Without a finished step, at least this long,"""
    times: float = _TIMES
    """and so many times the median step."""
    timeout_s: float = 300.0
    """The collectives' own timeout. Where no step is due (before the first one, in a snapshot, an
    evaluation, a script's own code), or nobody waits for anybody, hanging is waiting for most of
    it."""

    def of_step(self, states: Sequence[WorkerState]) -> float:
        """Give the limit for a step, by the slowest worker's usual one."""
        usual = [state.median_step_s for state in states if state.median_step_s is not None]
        long_s = max(self.least_s, self.times * max(usual, default=0.0))
        return min(long_s, self.of_waiting)  # before those that wait give up by themselves

    @property
    def of_waiting(self) -> float:
        """The limit for waiting where no step is due; a little before the collective gives up."""
        return _OF_TIMEOUT * self.timeout_s


@dataclass(frozen=True, kw_only=True)
class Hang:
    """A training that doesn't go on."""

    missing: tuple[int, ...]
    """Ranks that the others wait for; empty where all are in the same collective."""
    quiet_s: float
    """For how long nothing has happened."""
    usual_s: float | None
    """The median step."""
    reason: str
    """What shows it, as the end of a sentence."""
    is_mismatch: bool = False
    """Whether workers wait in different collectives: the script's fault."""


def detect_hang(states: Sequence[WorkerState], limits: HangLimits, unseen: int = 0) -> Hang | None:
    """Decide whether these workers hang.

    Args:
        states: Of all workers of a training, from one moment (to a few seconds).
        unseen: Workers whose states aren't known; there may be a reason for waiting with them, so
            that the limit doubles.
    """
    gone = any(state.process in ("gone", "traced") for state in states)
    if not states or gone:
        return None  # ends by itself, or is in the hands of a person
    # All are within steps: the limit comes from their usual step, and who is behind is missing.
    stepping = all(state.reading.operation in STEPPING and state.reading.steps for state in states)
    if stepping:
        quiet_s, limit_s = min(s.step_age_s for s in states), limits.of_step(states)
        missing, reason = find_missing(states)
        if not reason:  # nobody waits for anybody: they may compile, or read slowly
            limit_s = max(limit_s, limits.timeout_s)
            reason = "no worker has finished a step"
    else:
        # Elsewhere no step is due: only waiting in a collective counts, by its own timeout, and
        # waiting for a GPU, which may be in one.
        waiting = [
            s.age_s for s in states if s.reading.collective or s.reading.operation == DEVICE_WAIT
        ]
        quiet_s, limit_s = max(waiting, default=0.0), limits.of_waiting
        missing, reason = find_missing(states)
        reason = reason or "a worker waits for the others"
    # In different collectives they would wait for ever.
    is_mismatch = _elsewhere(states) is not None
    if is_mismatch:
        quiet_s, limit_s = min(s.age_s for s in states), min(limit_s, _MISMATCH_S)
    # Unseen workers may explain the wait.
    if quiet_s < limit_s * (2 if unseen else 1):
        return None
    # Imported here: it takes 10 ms, of the 300 that a person waits for a command's first line.
    from statistics import median

    usual = [state.median_step_s for state in states if state.median_step_s is not None]
    usual_s = median(usual) if usual else None
    is_mismatch = is_mismatch and not any(state.process == "stopped" for state in states)
    return Hang(
        missing=missing,
        quiet_s=quiet_s,
        usual_s=usual_s,
        reason=reason,
        is_mismatch=is_mismatch,
    )


def find_missing(states: Sequence[WorkerState]) -> tuple[tuple[int, ...], str]:
    """Find the workers that the others wait for.

    Args:
        states: Of a training that doesn't go on.

    Returns:
        Their ranks, none where all wait in one collective; and what shows it. An empty text where
        nobody waits for anybody.
    """
    # From the most certain sign to the least: first a process that a signal has stopped;
    stopped = _ranks(state for state in states if state.process == "stopped")
    if stopped:
        return stopped, "stopped by a signal"
    # then different collectives under the same number: their order differs between workers;
    if (few := _elsewhere(states)) is not None:
        return few, (
            "in another collective than the others: one was left out, or is one too many, as where "
            "one worker alone has no s.step(...) for a batch, or calls s.evaluate(...)"
        )
    # then progress: whoever has begun fewer collectives keeps the others waiting;
    places = {state.rank: (state.reading.collectives, state.reading.step or 0) for state in states}
    least = min(places.values())
    behind = tuple(sorted(rank for rank, place in places.items() if place == least))
    if len(behind) < len(states):
        if all(state.reading.operation == DEVICE_WAIT for state in states if state.rank in behind):
            return behind, "behind the others, waiting for its GPU, on which something doesn't end"
        return behind, "behind the others"
    return _find_among_equals(states)


def _find_among_equals(states: Sequence[WorkerState]) -> tuple[tuple[int, ...], str]:
    """Find who is missing where all are at the same place."""
    # Waiting for GPUs: on each of them is the same kernel or collective;
    on_device = _ranks(state for state in states if state.reading.operation == DEVICE_WAIT)
    if len(on_device) == len(states):
        return (), "all wait for their GPUs: a kernel or a collective on them doesn't end"
    # then CPU time: some compute while the others wait;
    waits = {state.rank: state.busy < _IDLE or state.rank in on_device for state in states}
    busy = _ranks(state for state in states if state.busy > _BUSY and not waits[state.rank])
    idle = _ranks(state for state in states if waits[state.rank])
    if busy and len(busy) + len(idle) == len(states) and idle:
        return busy, "computing without an end while the others wait"
    # and at last, with all idle in the same collective, the network between them.
    if all(state.reading.collective for state in states) and len(idle) == len(states) > 1:
        return (), "all wait in the same collective: the connection between them may be lost"
    return (), ""


def _elsewhere(states: Sequence[WorkerState]) -> tuple[int, ...] | None:
    """Find those that are in another collective than most, though all have begun equally many."""
    inside = Counter((state.reading.step or 0, state.reading.collective) for state in states)
    if len(inside) == 1 or len({state.reading.collectives for state in states}) > 1:
        return None
    if not all(state.reading.collective for state in states):
        return None
    # Of as many here as there those stand out that are further: they have left one out. Where
    # nobody stands out, everybody does.
    order = {place: (number, -place[0]) for place, number in inside.items()}
    rare = [place for place in inside if order[place] == min(order.values())]
    return _ranks(
        state for state in states if (state.reading.step or 0, state.reading.collective) in rare
    )


def _ranks(states: Iterable[WorkerState]) -> tuple[int, ...]:
    return tuple(sorted(state.rank for state in states))
