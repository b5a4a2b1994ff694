"""What all workers of one launch saw, put together: its steps, passes and evaluations.

A rank's events tell when a batch was taken from its DataLoader. Most scripts train on it at once;
Lightning and Accelerate take the next one first, to know which is the last.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, final

from paceline.verify.events import (
    Backward,
    Began,
    Clipped,
    Combined,
    Drawn,
    Drew,
    Ended,
    Evaluated,
    Event,
    Figured,
    Met,
    ModeChanged,
    ModelBuilt,
    Monitored,
    Normalised,
    PassBegun,
    PassEnded,
    Placed,
    Printed,
    Reduced,
    Scaled,
    Stepped,
)
from paceline.verify.tensor_sketch import identity

Kind = TypeVar("Kind", bound=Event)


@final
@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step, over all ranks."""

    stepped: tuple[Stepped, ...]
    """By rank."""
    samples: tuple[tuple[str, ...], ...]
    """By rank."""
    contents: tuple[tuple[str, ...], ...]
    losses: tuple[float, ...]
    """Sum over the step's backward passes, by rank."""
    weights: tuple[float, ...]
    """What Paceline's session multiplies each rank's loss by; 1 in plain scripts."""
    unsynced: tuple[int, ...] = ()
    """Ranks whose last backward pass combined nothing, though DistributedDataParallel is there."""

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

    def loss(self, *, by_samples: bool) -> float:
        """Give the step's loss over all ranks, each weighted by its samples or all alike."""
        weights = [float(n) for n in self.shares] if by_samples else list(self.weights)
        pairs = zip(weights, self.losses, strict=True)
        total = sum(weights)
        return sum(w * loss for w, loss in pairs if w) / total if total else 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Pass:
    """One pass over a loader, over all ranks."""

    begun: tuple[PassBegun, ...]
    """By rank; empty for Paceline's own loaders."""
    samples: tuple[tuple[str, ...], ...]
    """By rank, in order."""
    contents: tuple[tuple[str, ...], ...] = ()
    """Hashes of their values, by rank."""
    batches: tuple[int, ...]
    """By rank."""
    trains: bool
    is_whole: bool
    """Whether every rank that took part came to its end."""
    is_cut: bool
    """Whether we ended it on any rank."""
    number: int
    """Among the passes of its kind."""
    loader: int

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
    """One launch.

    Flat, since each detector takes other fields of it.
    """

    workers: int
    steps: tuple[Step, ...] = ()
    passes: tuple[Pass, ...] = ()
    models: tuple[tuple[ModelBuilt, ...], ...] = ()
    """By rank."""
    normalised: tuple[str, ...] = ()
    """Names of the BatchNorms that see their own share only."""
    drew: tuple[tuple[Drew, ...], ...] = ()
    """By rank."""
    modes: tuple[tuple[ModeChanged, ...], ...] = ()
    """By rank: which modules train in evaluation mode, and since when."""
    evaluated: tuple[tuple[Evaluated, ...], ...] = ()
    """By rank."""
    reduced: tuple[Reduced, ...] = ()
    """By rank 0, of its own, outside of steps; the last one first."""
    figured: tuple[Figured, ...] = ()
    printed: tuple[str, ...] = ()
    printed_at: tuple[str, ...] = ()
    """The script's line that has printed each."""
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Lines of the script by what they do, of the first rank that does it."""
    monitored: tuple[tuple[float, ...], ...] = ()
    """Figures that a schedule was given, by rank."""
    scales: tuple[tuple[float, ...], ...] = ()
    """Loss scales in the order of steps, by rank."""
    clips_early: tuple[str, ...] = ()
    """What comes after gradients were clipped, and still changes them."""
    is_cut: bool = False
    in_shards: bool = False
    """Whether a rank's steps are made of several shards, the same on any number of workers."""
    failure: str = ""
    """Why the launch failed, in the launcher's words; empty where it didn't."""
    locations: tuple[str, ...] = ()
    """Where each rank was when the ranks lost one another; empty where it failed otherwise."""
    has_joined: bool = False
    """Whether a rank has made a process group."""
    has_met: bool = False
    """Whether a rank has communicated with others by torch.distributed."""
    programs: tuple[str, ...] = ()
    """Commands of other programs that the script has started: these aren't watched."""
    torch: str = ""
    """Version of PyTorch; empty where rank 0 didn't come to the training's end."""
    began_s: float | None = None
    """When the last rank had its first batch, by the machine's monotonic clock."""
    took_s: float = 0.0
    """The whole launch."""
    starting_s: float = 0.0
    """The part of it before the first batch: processes, imports, data."""

    @property
    def in_session(self) -> bool:
        """Whether Paceline trained."""
        return any(model.by == "session" for ranks in self.models for model in ranks)

    def training(self) -> list[Pass]:
        """Give the passes that were trained on."""
        return [found for found in self.passes if found.trains]

    def evaluations(self) -> list[Pass]:
        """Give the passes that were not."""
        return [found for found in self.passes if not found.trains]


def collect_trace(
    ranks: Sequence[Sequence[Event]],
    failure: str = "",
    locations: Sequence[str] = (),
    programs: Sequence[str] = (),
) -> Trace:
    """Put the events of all ranks of one launch together.

    Args:
        ranks: Each rank's events in order.
        locations: Where each rank was, where they lost one another.
    """
    ranks = [trained_in_order(events) for events in ranks]
    training = _training_loaders(ranks)
    first = ranks[0] if ranks else ()
    return Trace(
        workers=len(ranks),
        steps=tuple(_steps(ranks, training)),
        passes=tuple(_passes(ranks, training)),
        models=_by_rank(ranks, ModelBuilt),
        normalised=tuple(dict.fromkeys(e.module for e in first if isinstance(e, Normalised))),
        drew=_by_rank(ranks, Drew),
        modes=_by_rank(ranks, ModeChanged),
        evaluated=_by_rank(ranks, Evaluated),
        reduced=tuple(_reduced(first)),
        figured=tuple(e for e in first if isinstance(e, Figured)),
        printed=tuple(e.line for e in first if isinstance(e, Printed)),
        printed_at=tuple(e.at for e in first if isinstance(e, Printed)),
        places=_places(ranks),
        monitored=tuple(tuple(e.figure for e in r if isinstance(e, Monitored)) for r in ranks),
        scales=tuple(tuple(e.scale for e in r if isinstance(e, Scaled)) for r in ranks),
        clips_early=tuple(_after_clipping(first)),
        is_cut=any(e.is_cut for e in first if isinstance(e, Ended)),
        in_shards=any(len({e.part for e in r if isinstance(e, Drawn)}) > 1 for r in ranks),
        failure=failure,
        locations=tuple(locations),
        has_joined=any(isinstance(e, Met) for events in ranks for e in events),
        has_met=any(isinstance(e, Met) and not e.joined_only for r in ranks for e in r),
        programs=tuple(programs),
        torch=next((e.torch for e in first if isinstance(e, Ended)), ""),
        began_s=max((e.at_s for r in ranks for e in r if isinstance(e, Began)), default=None),
    )


def _reduced(events: Sequence[Event]) -> Iterable[Reduced]:
    """Give what was combined outside of steps: no backward pass follows before the next batch."""
    in_step = False
    # Backwards in time: a backward pass that is met first means that a step was under way.
    for event in reversed(events):
        if isinstance(event, Backward):
            in_step = True
        elif isinstance(event, Drawn | PassBegun | PassEnded | Stepped):
            in_step = False
        elif isinstance(event, Reduced) and not in_step:
            yield event


def _places(ranks: Sequence[Sequence[Event]]) -> Mapping[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for events in ranks:
        own: defaultdict[str, list[str]] = defaultdict(list)
        for event in events:
            if isinstance(event, Placed):
                own[event.what].append(event.at)
        found = {what: tuple(dict.fromkeys(at)) for what, at in own.items()} | found
    return found


def _after_clipping(events: Sequence[Event]) -> Iterator[str]:
    """Tell what changes gradients between clipping them and the step."""
    is_clipped = False
    for event in events:
        if isinstance(event, Stepped):
            is_clipped = False
        elif isinstance(event, Clipped):
            is_clipped = True
        elif is_clipped and isinstance(event, Backward):
            yield "another backward pass adds to them"
            return
        elif is_clipped and isinstance(event, Combined):
            yield "the ranks' gradients are combined"
            return


def _by_rank(ranks: Sequence[Sequence[Event]], kind: type[Kind]) -> tuple[tuple[Kind, ...], ...]:
    return tuple(tuple(e for e in events if isinstance(e, kind)) for events in ranks)


def _training_loaders(ranks: Sequence[Sequence[Event]]) -> set[int]:
    """Find the loaders most of whose batches are followed by a backward pass before the next."""
    followed: Counter[int] = Counter()
    drawn: Counter[int] = Counter()
    for events in ranks:
        open_loaders: set[int] = set()
        # A batch counts as trained on if a backward pass comes before its loader's pass ends.
        for event in events:
            if isinstance(event, Drawn):
                drawn[event.loader] += 1
                open_loaders.add(event.loader)
                if event.trains:
                    followed[event.loader] += 1
            elif isinstance(event, Backward):
                followed.update(open_loaders)
                open_loaders.clear()
            elif isinstance(event, PassEnded):
                open_loaders.discard(event.loader)
    return {loader for loader, count in drawn.items() if 2 * followed[loader] > count}


def _steps(ranks: Sequence[Sequence[Event]], training: set[int]) -> Iterable[Step]:
    # Step n of all ranks together; the rank with the fewest steps ends it.
    for parts in zip(*(_sorted(events, training) for events in ranks), strict=False):
        yield Step(
            stepped=tuple(stepped for stepped, _, _ in parts),
            samples=tuple(tuple(s for d in drawn for s in d.samples) for _, drawn, _ in parts),
            contents=tuple(tuple(c for d in drawn for c in d.contents) for _, drawn, _ in parts),
            losses=tuple(_loss_of(backwards) for _, _, backwards in parts),
            weights=tuple(sum(b.weight for b in backwards) for _, _, backwards in parts),
            unsynced=tuple(
                rank
                for rank, (_, _, backwards) in enumerate(parts)
                if backwards and backwards[-1].synced is False
            ),
        )


def _loss_of(backwards: Sequence[Backward]) -> float:
    """Add a step's losses up; those that Paceline weights are averaged."""
    weight = sum(b.weight for b in backwards)
    plain = all(b.weight == 1.0 for b in backwards)
    if plain or not weight:
        return sum(b.loss for b in backwards)
    return sum(b.loss * b.weight for b in backwards if b.weight) / weight


def _sorted(
    events: Sequence[Event], training: set[int]
) -> Iterator[tuple[Stepped, list[Drawn], list[Backward]]]:
    """Give each step of a rank, with what came before it."""
    drawn: list[Drawn] = []
    backwards: list[Backward] = []
    for event in events:
        if isinstance(event, Drawn) and event.loader in training:
            drawn.append(event)
        elif isinstance(event, Backward):
            backwards.append(event)
        elif isinstance(event, Stepped):
            yield event, drawn, backwards
            drawn, backwards = [], []


def _passes(ranks: Sequence[Sequence[Event]], training: set[int]) -> Iterable[Pass]:
    drawn: Mapping[tuple[int, int], list[list[str]]]
    drawn = defaultdict(lambda: [[] for _ in ranks])
    contents: Mapping[tuple[int, int], list[list[str]]]
    contents = defaultdict(lambda: [[] for _ in ranks])
    batches: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    ended: dict[tuple[int, int, int], bool] = {}
    begun: dict[tuple[int, int], list[PassBegun]] = {}
    lengths: dict[tuple[int, int, int], int] = {}
    # Sort the events by loader and pass; the same pass of all ranks comes together.
    for rank, events in enumerate(ranks):
        for event in events:
            if isinstance(event, Drawn):
                drawn[event.loader, event.number][rank] += event.samples
                contents[event.loader, event.number][rank] += event.contents
                batches[event.loader, event.number][rank] += 1
            elif isinstance(event, PassBegun):
                begun.setdefault((event.loader, event.number), []).append(event)
                lengths[rank, event.loader, event.number] = event.batches
            elif isinstance(event, PassEnded):
                ended[rank, event.loader, event.number] = event.is_cut
    # Passes in order, numbered apart for training and evaluation.
    numbers: Counter[bool] = Counter()
    for (loader, number), samples in drawn.items():
        trains = loader in training
        came_to_end = {  # a script that counts its batches asks for no more than there are
            rank
            for rank, count in batches[loader, number].items()
            if ended.get((rank, loader, number)) is False
            or lengths.get((rank, loader, number)) == count
        }
        yield Pass(
            begun=tuple(begun.get((loader, number), ())),
            samples=tuple(map(tuple, samples)),
            contents=tuple(map(tuple, contents[loader, number])),
            batches=tuple(batches[loader, number][rank] for rank in range(len(ranks))),
            trains=trains,
            is_whole=len(came_to_end) == len(batches[loader, number]),
            is_cut=any(
                ended.get((r, loader, number), False)
                for r in batches[loader, number]
                if r not in came_to_end
            ),
            number=numbers[trains],
            loader=loader,
        )
        numbers[trains] += 1


def cut_up_before(first: Trace, other: Trace) -> set[int]:
    """Find the loaders whose data sets a script has divided among its ranks by itself.

    Their indices count each rank's own samples, so that those of two ranks are different samples.
    """
    wholes = {found.loader: found.begun for found in first.passes if found.begun}
    parts = {found.loader: found.begun for found in other.passes if found.begun}
    return {
        loader
        for loader, begun in parts.items()
        if len(begun) == other.workers > first.workers == 1
        and loader in wholes
        and sum(part.samples for part in begun) == wholes[loader][0].samples > begun[0].samples
    }


def by_content(trace: Trace, loaders: set[int]) -> Trace:
    """Identify the samples of some loaders by their values instead of by their indices."""
    trains = any(found.loader in loaders for found in trace.training())
    return replace(
        trace,
        passes=tuple(
            replace(p, samples=_identities(p.contents)) if p.loader in loaders else p
            for p in trace.passes
        ),
        steps=tuple(
            replace(s, samples=_identities(s.contents)) if trains else s for s in trace.steps
        ),
    )


def _identities(contents: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(map(identity, share)) for share in contents)


_SIGNIFICANT = 3
"""Steps, the first after two batches and the others after one each, that aren't accumulation."""

_OWN_AND_NEXT = 2

Key = tuple[int, int]
"""Of a pass: loader and number."""


def trained_in_order(events: Sequence[Event]) -> list[Event]:
    """Leave out batches that were only looked at, and put each before the step that it was for.

    Args:
        events: One rank's, as they happened.
    """
    peeks = set(_peeks(events))
    kept = [event for event in events if _key(event) not in peeks]
    ahead = _fetched_ahead(kept)
    return list(_delayed(kept, ahead)) if ahead else kept


def _key(event: Event) -> Key | None:
    if isinstance(event, PassBegun | Drawn | PassEnded):
        return event.loader, event.number
    return None


def _peeks(events: Sequence[Event]) -> Iterator[Key]:
    """Find passes like `next(iter(loader))`: one batch of several, and no step with it."""
    drawn = Counter(_key(event) for event in events if isinstance(event, Drawn))
    lengths = {_key(event): event.batches for event in events if isinstance(event, PassBegun)}
    ended = {_key(event) for event in events if isinstance(event, PassEnded)}
    waiting: set[Key] = set()
    # A batch waits for a backward pass. Where another pass begins before, it was only looked at.
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
class _Alternation:
    """How batches and steps of a pass alternate."""

    new: int = 0
    """Batches since the last backward pass."""
    before_steps: list[int] = field(default_factory=list)
    """Batches that were taken before each run of backward passes."""
    steps: int = 0
    backwards: int = 0
    """Backward passes since the last batch."""
    is_over: bool = False
    """Whether the pass came to its end."""

    @property
    def is_ahead(self) -> bool:
        """Whether each step but the last had the batch after its own before it.

        In a pass that was seen to its end the last step then has no batch before it, unlike where
        only the first batch was skipped.
        """
        first, *later = self.before_steps or [0]
        is_whole = self.steps == first + sum(later) or (
            len(self.before_steps) >= _SIGNIFICANT
            and not (self.is_over and self.backwards < _OWN_AND_NEXT)
        )
        return first == _OWN_AND_NEXT and set(later) <= {1} and is_whole


def _fetched_ahead(events: Sequence[Event]) -> set[int]:
    """Find the loaders whose batches are taken one step ahead."""
    passes: defaultdict[Key, _Alternation] = defaultdict(_Alternation)
    latest: _Alternation | None = None
    # Count, for each pass, the batches between optimizer steps and backward passes.
    for event in events:
        if isinstance(event, Drawn) and not event.trains:
            latest = passes[event.loader, event.number]
            latest.new += 1
            latest.backwards = 0
        elif isinstance(event, Backward) and latest is not None:
            latest.backwards += 1
            latest.before_steps += [latest.new] * (latest.new > 0)
            latest.new = 0
        elif isinstance(event, PassEnded) and not event.is_cut:
            passes[event.loader, event.number].is_over = True
        elif isinstance(event, Stepped) and latest is not None and event.optimizer == 0:
            latest.steps += 1
    return {loader for (loader, _), alternation in passes.items() if alternation.is_ahead}


def _delayed(events: Sequence[Event], loaders: set[int]) -> Iterator[Event]:
    """Delay these loaders' batches until the next one is taken, or the step before has ended.

    The last of a pass has no next one: it comes before the first backward pass of its own step. One
    that was taken in vain, since the script left its loop, is left out.
    """
    last = {_key(event): event for event in events if isinstance(event, Drawn)}
    held: dict[int, Drawn] = {}
    has_stepped = False
    # At most one batch of each loader is held back at a time.
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
