"""What all workers of one launch saw: its events, and the steps and passes that they make."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from typing import TypeVar, final

from paceline.verify.events import (
    Backward,
    Drawn,
    Ended,
    Event,
    ModelBuilt,
    PassBegun,
    PassEnded,
    Placed,
    Stepped,
)
from paceline.verify.tensor_sketch import identity

Kind = TypeVar("Kind", bound=Event)
Key = tuple[int, int]
"""Of a pass: loader and number."""
_AHEAD = 2
"""Batches before the first backward pass where the next one is always taken early."""


@final
@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step, over all ranks; all fields are by rank."""

    stepped: tuple[Stepped, ...]
    drawn: tuple[tuple[Drawn, ...], ...]
    """Batches that were trained on."""
    skipped: tuple[tuple[Drawn, ...], ...]
    """Batches that were taken and not trained on."""
    backwards: tuple[tuple[Backward, ...], ...]
    samples: tuple[tuple[str, ...], ...]
    contents: tuple[tuple[str, ...], ...]

    @property
    def all_samples(self) -> list[str]:
        """All ranks' samples, sorted."""
        return sorted(sample for share in self.samples for sample in share)

    @property
    def sample_contents(self) -> dict[str, str]:
        """The hash of each sample's values."""
        pairs = zip(self.samples, self.contents, strict=True)
        return {s: c for share, contents in pairs for s, c in zip(share, contents, strict=False)}

    @property
    def shares(self) -> tuple[int, ...]:
        """How many samples each rank had."""
        return tuple(len(share) for share in self.samples)

    @cached_property
    def losses(self) -> tuple[float, ...]:
        """Sum over the step's backward passes, by rank; a weighted mean where Paceline weighs."""
        return tuple(map(_loss_of, self.backwards))

    @cached_property
    def infinite(self) -> tuple[str, ...]:
        """Name what isn't finite: each rank's loss, then rank 0's gradients and new weights."""
        own = self.stepped[0]
        losses = (f"the loss of rank {r}" for r, x in enumerate(self.losses) if not isfinite(x))
        pairs = [*zip(own.names, own.gradients, strict=True)]
        named = (f"the gradient of {n}" for n, g in pairs if g is not None and not isfinite(g.norm))
        weights = zip(own.names, own.weights, strict=True)
        after = (f"the new weight {name}" for name, w in weights if not isfinite(w.norm))
        return (*losses, *named, *after)

    def loss(self, *, by_samples: bool) -> float:
        """Give the step's loss over all ranks, each weighted by its samples or all alike."""
        own = [sum(b.weight for b in backwards) for backwards in self.backwards]
        weights = [float(n) for n in self.shares] if by_samples else own
        total = sum(weights)
        pairs = zip(weights, self.losses, strict=True)
        return sum(w * loss for w, loss in pairs if w) / total if total else 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass over a loader, over all ranks."""

    loader: int
    begun: tuple[PassBegun, ...]
    """By rank; empty for Paceline's own loaders."""
    samples: tuple[tuple[str, ...], ...]
    """By rank, in order."""
    contents: tuple[tuple[str, ...], ...]
    """Hashes of their values, by rank."""
    batches: tuple[int, ...]
    """By rank."""
    trains: bool
    is_whole: bool
    """Whether every rank that took part came to its end."""
    is_cut: bool
    """Whether we ended it on any rank."""

    def sample_contents(self) -> Iterator[tuple[str, str]]:
        """Give each sample with the hash of its values, where that is known."""
        for samples, contents in zip(self.samples, self.contents, strict=False):
            if len(samples) == len(contents):
                yield from zip(samples, contents, strict=True)

    @property
    def counts(self) -> Counter[str]:
        """How often each sample was taken, over all ranks."""
        return Counter(sample for share in self.samples for sample in share)


@final
@dataclass(frozen=True, kw_only=True)
class Trace:
    """One launch."""

    ranks: tuple[tuple[Event, ...], ...]
    """Each rank's events, as they happened."""
    failure: str = ""
    """Why the launch failed, in the launcher's words; empty where it didn't."""
    locations: tuple[str, ...] = ()
    """Where each rank was when the ranks lost one another; empty where it failed otherwise."""
    programs: tuple[str, ...] = ()
    """Commands of other programs that the script has started: these aren't watched."""
    only: tuple[Step, ...] | None = None
    """The steps to be compared, where these aren't all."""
    by_content: frozenset[int] = frozenset()
    """Loaders whose samples are known by their values rather than by their indices."""
    in_time: frozenset[int] = frozenset()
    """Loaders that another launch tells to be without look-ahead, whatever it seems here."""
    took_s: float = 0.0
    """The whole launch."""
    starting_s: float = 0.0
    """The part of it before the first batch: processes, imports, data."""

    @property
    def workers(self) -> int:
        """How many there were."""
        return len(self.ranks)

    def of(self, kind: type[Kind]) -> tuple[tuple[Kind, ...], ...]:
        """Give the events of a kind, by rank."""
        return tuple(tuple(e for e in events if isinstance(e, kind)) for events in self.ranks)

    def by_rank_0(self, kind: type[Kind]) -> tuple[Kind, ...]:
        """Give rank 0's events of a kind."""
        return (self.of(kind) or ((),))[0]

    @property
    def torch(self) -> str:
        """Version of PyTorch; empty where rank 0 didn't come to the training's end."""
        return next((event.torch for event in self.by_rank_0(Ended)), "")

    @property
    def libraries(self) -> tuple[str, ...]:
        """Name the libraries that it trains by, the outermost first."""
        return next((event.libraries for event in self.by_rank_0(Ended)), ())

    @property
    def in_session(self) -> bool:
        """Whether Paceline trained."""
        return any(model.by == "session" for ranks in self.of(ModelBuilt) for model in ranks)

    @property
    def in_shards(self) -> bool:
        """Whether a rank's steps are of several shards, the same on any number of workers."""
        return any(len({e.part for e in rank}) > 1 for rank in self.of(Drawn))

    @cached_property
    def breaks_at(self) -> int | None:
        """Give the first step, from 0, with a loss, gradient or weight that isn't finite."""
        return next((n for n, step in enumerate(self.steps) if step.infinite), None)

    @cached_property
    def places(self) -> Mapping[str, tuple[str, ...]]:
        """Give lines of the script by what they do, of the first rank that does it."""
        found: dict[str, tuple[str, ...]] = {}
        for events in self.of(Placed):
            own: defaultdict[str, list[str]] = defaultdict(list)
            for event in events:
                own[event.what].append(event.at)
            found = {what: tuple(dict.fromkeys(at)) for what, at in own.items()} | found
        return found

    @cached_property
    def _passes_by_rank(self) -> list[dict[Key, "_PassOfRank"]]:
        return [_passes_of(events) for events in self.ranks]

    @property
    def without_look_ahead(self) -> frozenset[int]:
        """Loaders whose batches are all taken when they are needed."""
        own = [(key[0], p.is_ahead) for passes in self._passes_by_rank for key, p in passes.items()]
        return frozenset(loader for loader, _ in own) - {loader for loader, ahead in own if ahead}

    @cached_property
    def _training(self) -> set[Key]:
        """The passes most of whose batches come before backward passes."""
        drawn, fed = Counter[Key](), Counter[Key]()
        for passes in self._passes_by_rank:
            for key, found in passes.items():
                drawn[key] += found.drawn
                fed[key] += found.fed
        return {key for key, count in drawn.items() if 2 * fed[key] > count}

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Give step n of all ranks together; the rank with the fewest steps ends it."""
        if self.only is not None:
            return self.only
        parts = (self._steps_of(rank) for rank in range(self.workers))
        return tuple(
            Step(
                stepped=tuple(stepped for stepped, _ in step),
                drawn=tuple(tuple(part.drawn) for _, part in step),
                skipped=tuple(tuple(part.skipped) for _, part in step),
                backwards=tuple(tuple(part.backwards) for _, part in step),
                samples=tuple(tuple(self._samples(part.drawn)) for _, part in step),
                contents=tuple(
                    tuple(c for d in part.drawn for c in d.contents) for _, part in step
                ),
            )
            for step in zip(*parts, strict=False)
        )

    def _samples(self, drawn: Iterable[Drawn]) -> Iterator[str]:
        for batch in drawn:
            yield from (
                map(identity, batch.contents) if batch.loader in self.by_content else batch.samples
            )

    def _steps_of(self, rank: int) -> Iterator[tuple[Stepped, "_Part"]]:
        passes, part = self._passes_by_rank[rank], _Part()
        for event in in_order(self.ranks[rank], passes, self.in_time):
            if isinstance(event, Drawn) and _key(event) in self._training:
                part.draw(event, alternates=passes[_key(event)].alternates)
            elif isinstance(event, Backward):
                part.go_back(event)
            elif isinstance(event, Stepped):
                yield event, part
                part = _Part()

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """Give all passes in order; the same pass of all ranks together."""
        keys = dict.fromkeys(key for own in self._passes_by_rank for key in own)
        return tuple(self._pass(key) for key in keys if self._is_pass(key))

    def _is_pass(self, key: Key) -> bool:
        """Tell a pass from batches that were only looked at, as by `next(iter(loader))`."""
        own = [passes[key] for passes in self._passes_by_rank if key in passes]
        is_look = all(p.drawn == 1 and not p.is_over and not p.is_whole for p in own)
        return any(p.drawn for p in own) and (key in self._training or not is_look)

    def _pass(self, key: Key) -> Pass:
        own = [passes.get(key, _PassOfRank()) for passes in self._passes_by_rank]
        drawn = [[d for d in rank if _key(d) == key] for rank in self.of(Drawn)]
        took_part = [part for part in own if part.drawn]
        return Pass(
            loader=key[0],
            begun=tuple(part.begun for part in own if part.begun),
            samples=tuple(tuple(self._samples(batches)) for batches in drawn),
            contents=tuple(tuple(c for d in batches for c in d.contents) for batches in drawn),
            batches=tuple(part.drawn for part in own),
            trains=key in self._training,
            is_whole=all(part.is_whole for part in took_part),
            is_cut=any(part.is_cut and not part.is_whole for part in took_part),
        )

    def trains(self, batch: Drawn) -> bool:
        """Tell whether a batch is of a pass that was trained on."""
        return _key(batch) in self._training

    def training(self) -> list[Pass]:
        """Give the passes that were trained on."""
        return [found for found in self.passes if found.trains]

    def evaluations(self) -> list[Pass]:
        """Give the passes that were not."""
        return [found for found in self.passes if not found.trains]


def _loss_of(backwards: Sequence[Backward]) -> float:
    """Add a step's losses up; those that Paceline weights are averaged."""
    weight = sum(b.weight for b in backwards)
    if all(b.weight == 1.0 for b in backwards) or not weight:
        return sum(b.loss for b in backwards)
    return sum(b.loss * b.weight for b in backwards if b.weight) / weight


@final
@dataclass
class _Part:
    """One rank's part of a step, while it is put together."""

    drawn: list[Drawn] = field(default_factory=list)
    skipped: list[Drawn] = field(default_factory=list)
    backwards: list[Backward] = field(default_factory=list)
    _new: Drawn | None = None
    """The last batch, as long as no backward pass has followed it."""
    _used: int = 0
    """Batches that a backward pass has followed."""

    def draw(self, batch: Drawn, *, alternates: bool) -> None:
        """Add a batch; of those that alternate with backward passes one without is skipped."""
        if self._new is not None and self._new.loader == batch.loader and alternates:
            self.drawn.remove(self._new)
            self.skipped.append(self._new)
        self.drawn.append(batch)
        self._new = batch

    def go_back(self, backward: Backward) -> None:
        """Add a backward pass; where gradients were zeroed before it, it is the step's first."""
        is_plain = not any(batch.trains for batch in self.drawn)
        if is_plain and self.backwards and not backward.adds:
            self.drawn, self.backwards = self.drawn[self._used :], []
        self.backwards.append(backward)
        self._new, self._used = None, len(self.drawn)


@final
@dataclass
class _PassOfRank:
    """What one rank saw of a pass."""

    begun: PassBegun | None = None
    drawn: int = 0
    fed: int = 0
    """Batches that a backward pass has followed."""
    turns: int = 0
    """Backward passes that have followed a batch directly."""
    before_first: int = 0
    """Batches before the first of these backward passes."""
    is_over: bool = False
    is_cut: bool = False
    goes_back_after: bool = False
    """Whether a backward pass followed its end, before any other batch."""

    def see(self, event: PassBegun | Drawn | PassEnded) -> Key | None:
        """Count an event; gives the pass where this is its end."""
        if isinstance(event, PassBegun):
            self.begun = event
        elif isinstance(event, Drawn):
            self.drawn += 1
            self.fed += event.trains is True
        else:
            self.is_over, self.is_cut = True, event.is_cut
            return _key(event)
        return None

    def feed(self) -> None:
        """Count a backward pass that its batches are trained by."""
        self.before_first = self.before_first or self.drawn
        self.turns += self.drawn > self.fed
        self.fed = self.drawn

    @property
    def is_whole(self) -> bool:
        """Whether it came to its end; a script that counts batches asks for no more than those."""
        known = self.begun.batches if self.begun else 0
        return (self.is_over and not self.is_cut) or (known > 0 and self.drawn == known)

    @property
    def is_ahead(self) -> bool:
        """Whether each batch is taken before the step of the one before, as by Accelerate."""
        ends_so = self.goes_back_after if self.is_over else self.drawn == self.turns + 1 > _AHEAD
        return self.before_first == _AHEAD and ends_so

    @property
    def alternates(self) -> bool:
        """Whether it is usual that a backward pass follows each batch."""
        return 3 * self.turns > 2 * self.drawn


def _passes_of(events: Sequence[Event]) -> dict[Key, _PassOfRank]:
    """Sort one rank's events by pass, and count which batches backward passes follow."""
    found: defaultdict[Key, _PassOfRank] = defaultdict(_PassOfRank)
    ended: Key | None = None  # the pass that has ended last, if nothing was taken since
    for event in events:
        if isinstance(event, PassBegun | Drawn | PassEnded):
            ended = found[_key(event)].see(event)
        elif isinstance(event, Backward):
            for key in event.fed:
                found[key].feed()
            if ended is not None:
                found[ended].goes_back_after = True
            ended = None
    return dict(found)


def _key(event: PassBegun | Drawn | PassEnded) -> Key:
    return event.loader, event.number


def in_order(
    events: Sequence[Event], passes: Mapping[Key, _PassOfRank], in_time: frozenset[int]
) -> Iterator[Event]:
    """Put batches that are taken one step ahead, as by Accelerate, behind the step before."""
    ahead = {loader for (loader, _), found in passes.items() if found.is_ahead} - in_time
    held: dict[int, Drawn] = {}
    drawn, has_stepped = Counter[Key](), False
    for event in events:
        if isinstance(event, PassBegun | Drawn | PassEnded) and event.loader in held:
            batch = held.pop(event.loader)
            if not isinstance(event, PassBegun):  # else it was taken in vain
                yield batch
        elif isinstance(event, Backward) and has_stepped:  # a pass's last batch is its own step's
            for key in [_key(batch) for batch in held.values()]:
                if drawn[key] == passes[key].drawn:
                    yield held.pop(key[0])
        if isinstance(event, Drawn) and event.loader in ahead:
            held[event.loader], has_stepped = event, False
            drawn[_key(event)] += 1
        else:
            has_stepped = has_stepped or isinstance(event, Stepped)
            yield event


def counted(events: Iterable[Event], steps: int = 0) -> Iterator[tuple[int, Event]]:
    """Yield a rank's events with the steps taken by then.

    Args:
        steps: Those before the first event.
    """
    for event in events:
        steps += isinstance(event, Stepped)
        yield steps, event


def cut_up_before(first: Trace, other: Trace) -> frozenset[int]:
    """Find the loaders whose data sets a script has divided among its ranks by itself.

    Their indices count each rank's own samples, so that those of two ranks are different samples.
    """
    wholes = {found.loader: found.begun for found in first.passes if found.begun}
    return frozenset(
        found.loader
        for found in other.passes
        if len(found.begun) == other.workers > first.workers == 1
        and found.loader in wholes
        and sum(part.samples for part in found.begun)
        == wholes[found.loader][0].samples
        > found.begun[0].samples
    )
