"""Which batch a step was trained on: batches that were only looked at, or fetched ahead.

A rank's events tell when a batch was taken from its DataLoader. Most scripts train on it at once;
Lightning and Accelerate take the next one first, to know which is the last.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import final

from paceline.verify.events import Backward, Drawn, Event, PassBegun, PassEnded, Stepped

_TELLING = 3
"""Steps, the first after two batches and the others after one each, that aren't accumulation."""

_OWN_AND_NEXT = 2

Key = tuple[int, int]
"""Of a pass: loader and number."""


def trained_in_order(events: Sequence[Event]) -> list[Event]:
    """Leave out batches that were only looked at, and put each before the step that it was for.

    Args:
        events: One rank's, as they happened.
    """
    looks = set(_looks(events))
    kept = [event for event in events if _key(event) not in looks]
    ahead = _fetched_ahead(kept)
    return list(_delayed(kept, ahead)) if ahead else kept


def _key(event: Event) -> Key | None:
    if isinstance(event, PassBegun | Drawn | PassEnded):
        return event.loader, event.number
    return None


def _looks(events: Sequence[Event]) -> Iterator[Key]:
    """Find passes like `next(iter(loader))`: one batch of several, and no step with it."""
    drawn = Counter(_key(event) for event in events if isinstance(event, Drawn))
    lengths = {_key(event): event.batches for event in events if isinstance(event, PassBegun)}
    ended = {_key(event) for event in events if isinstance(event, PassEnded)}
    waiting: set[Key] = set()
    for event in events:
        key = _key(event)
        if isinstance(event, Backward):
            waiting.clear()
        elif isinstance(event, PassBegun):
            yield from waiting
            waiting.clear()
        elif isinstance(event, Drawn) and key is not None and key not in ended:
            waiting |= {key} if drawn[key] == 1 and lengths.get(key, 1) != 1 else set()
    yield from waiting


@final
@dataclass
class _Taken:
    """How batches and steps of a pass alternate."""

    new: int = 0
    """Batches since the last backward pass."""
    before_steps: list[int] = field(default_factory=list)
    """Batches that were taken before each run of backward passes."""
    steps: int = 0

    @property
    def is_ahead(self) -> bool:
        """Whether each step but the last had the batch after its own before it."""
        first, *later = self.before_steps or [0]
        is_whole = self.steps == first + sum(later) or len(self.before_steps) >= _TELLING
        return first == _OWN_AND_NEXT and set(later) <= {1} and is_whole


def _fetched_ahead(events: Sequence[Event]) -> set[int]:
    """Find the loaders whose batches are taken one step ahead."""
    passes: defaultdict[Key, _Taken] = defaultdict(_Taken)
    latest: _Taken | None = None
    for event in events:
        if isinstance(event, Drawn) and not event.trains:
            latest = passes[event.loader, event.number]
            latest.new += 1
        elif isinstance(event, Backward) and latest is not None and latest.new:
            latest.before_steps.append(latest.new)
            latest.new = 0
        elif isinstance(event, Stepped) and latest is not None and event.optimizer == 0:
            latest.steps += 1
    return {loader for (loader, _), taken in passes.items() if taken.is_ahead}


def _delayed(events: Sequence[Event], loaders: set[int]) -> Iterator[Event]:
    """Tell of each of these loaders' batches when the next one is taken, or the step before ends.

    The last of a pass has no next one: it comes before the first backward pass of its own step. One
    that was taken in vain, since the script left its loop, is left out.
    """
    last = {_key(event): event for event in events if isinstance(event, Drawn)}
    held: dict[int, Drawn] = {}
    has_stepped = False
    for event in events:
        if isinstance(event, PassBegun):
            held.pop(event.loader, None)
        elif isinstance(event, Drawn) and event.loader in loaders:
            if event.loader in held:
                yield held[event.loader]
            held[event.loader], has_stepped = event, False
            continue
        elif isinstance(event, Backward) and has_stepped:
            yield from (held.pop(n) for n, one in list(held.items()) if last[_key(one)] is one)
        elif isinstance(event, Stepped) and event.optimizer == 0:
            has_stepped = True
        yield event
