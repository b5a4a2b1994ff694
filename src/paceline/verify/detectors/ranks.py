"""Faults that show between the ranks of one launch."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from paceline.verify import causes
from paceline.verify.causes import Cause
from paceline.verify.events import Drew, Evaluated, Event, Met, ModelBuilt, Scaled
from paceline.verify.finding import Case, Finding
from paceline.verify.trace import counted

_LINE = re.compile(r" at (\S+:\d+)")
_DRAWING = (
    ("dropout", causes.SAME_DROPOUT, "drop out"),
    ("data", causes.SAME_AUGMENTATION, "augment"),
    ("step", causes.SAME_NOISE, "draw noise in their steps"),
)


def no_communication(case: Case) -> Iterator[Finding]:
    """Find processes that train without ever communicating."""
    trace = case.other
    met = [event.joined_only for rank in trace.of(Met) for event in rank]
    if not all(met) or trace.failure or not trace.steps:
        return
    # `shared`: the ranks see the same samples; `equal`: they come to the same weights.
    shared = all(len(set(step.samples)) == 1 for step in trace.steps)
    equal = all(
        len({tuple(m.sha256 for m in stepped.weights) for stepped in step.stepped}) == 1
        for step in trace.steps
    )
    if not shared and (equal or met):
        return  # they have other ways than torch.distributed; or that is a finding of its own
    group = "a process group, never used" if met else "no process group is made"
    what = (
        f"the {trace.workers} processes never communicate ({group}, no collective call): each "
        "trains by itself"
    )
    if shared and equal:
        what += (
            f", on the same samples and to the same weights: one training, {trace.workers} times"
        )
    elif shared:
        what += ", on the same samples, to weights of its own"
    yield case.found(causes.NO_COMMUNICATION, what, step=0)


def same_random_numbers(case: Case) -> Iterator[Finding]:
    """Find ranks that draw the same random numbers for different samples."""
    samples = case.other.steps[0].samples
    if len(set(samples)) == 1 and samples[0]:
        return  # the ranks have the same samples: another finding
    for kind, cause, doing in _DRAWING:
        # What is drawn alike on purpose (a size for all) or seeded by sample makes no difference.
        differs = {"data": case.comparison.contents_differ_from, "step": case.beyond}
        if kind in differs and differs[kind] is None:
            continue
        draws = [
            sorted((e for e in rank if e.by.startswith(kind)), key=lambda e: e.by)
            for rank in case.other.of(Drew)
        ]
        for rank in range(1, len(draws)):
            if draws[0] and draws[rank] and draws[0][0].state == draws[rank][0].state:
                what = f"ranks 0 and {rank} {doing} by the same random numbers"
                yield case.found(cause, what, step=0, rank=rank)
                break


def buffers_apart(case: Case) -> Iterator[Finding]:
    """Find buffers that are each rank's own when they are used."""
    # Used in an evaluation they matter most; within training only where nobody broadcasts them.
    evaluated = [_by_step(events) for events in case.other.ranks]
    for steps in evaluated[0]:
        if all(steps in own for own in evaluated) and (
            found := _first_apart([own[steps].buffers for own in evaluated])
        ):
            rank, name = found
            what = f"an evaluation runs with another buffer {name} on rank {rank} than on rank 0"
            yield case.found(causes.BUFFERS_APART, what, rank=rank, tensor=name)
            return
    if any(model.broadcasts_buffers for model in _first_models(case)):
        return
    for number, step in enumerate(case.other.steps):
        if found := _first_apart([stepped.buffers for stepped in step.stepped]):
            rank, name = found
            what = f"after step {number + 1} rank {rank} has another buffer {name} than rank 0"
            yield case.found(causes.BUFFERS_APART, what, step=number, rank=rank, tensor=name)
            return


def start(case: Case) -> Iterator[Finding]:
    """Find ranks, or launches, that begin with other weights."""
    mine, theirs = (trace.steps[0].stepped for trace in case.traces)
    # First the ranks among themselves, then both launches.
    marks = [dict(zip(s.names, (m.sha256 for m in s.before), strict=False)) for s in theirs]
    if apart := _first_apart(marks):
        rank, name = apart
        what = f"rank {rank} begins with another {name} than rank 0"
        yield case.found(causes.START_APART, what, step=0, rank=rank, tensor=name)
    workers = case.first_workers
    for name, a, b in zip(theirs[0].names, mine[0].before, theirs[0].before, strict=False):
        if a.sha256 != b.sha256:
            what = f"the training begins with another {name} than on {workers}"
            yield case.found(causes.OTHER_START, what, step=0, tensor=name)
            return


def weights_apart(case: Case) -> Iterator[Finding]:
    """Find ranks whose weights become different, from the same start."""
    for number, step in enumerate(case.other.steps):
        # Ranks that begin apart are a finding of their own, and end apart as well.
        before = [[m.sha256 for m in s.before] for s in step.stepped]
        if any(one != before[0] for one in before):
            return
        named = [
            dict(zip(s.names, (m.sha256 for m in s.weights), strict=False)) for s in step.stepped
        ]
        if apart := _first_apart(named):
            rank, name = apart
            what = f"after step {number + 1} rank {rank} has another {name} than rank 0"
            cause, why = _why_apart(case, number, name)
            yield case.found(cause, what + why, step=number, rank=rank, tensor=name)
            return


def _why_apart(case: Case, number: int, name: str) -> tuple[Cause, str]:
    """Find the cause of ranks that come to other weights in a step, the most specific first."""
    trace, models = case.other, _first_models(case)
    scales = [own[number] for rank in trace.of(Scaled) if len(own := taken(rank)) > number]
    last = [backwards[-1] for backwards in trace.steps[number].backwards if backwards]
    if len(set(scales)) > 1:
        shown = ", ".join(f"{scale:g}" for scale in scales)
        return causes.SCALE_APART, f": the ranks' loss scales differ ({shown})"
    if "bypass" in trace.places:
        why = ": the forward pass bypasses DistributedDataParallel and calls the module in it"
        return causes.WRAPPER_BYPASSED, why
    if any(backward.synced is False for backward in last):
        why = (
            ": the forward pass before the step's last backward pass ran under no_sync() "
            "(require_backward_grad_sync=False)"
        )
        return causes.NO_SYNC, why
    if any(name in model.frozen for model in models):
        why = ": it needed no gradient when DistributedDataParallel was made"
        return causes.THAWED_LATE, why
    if "late" in trace.places:
        why = ": a parameter was put into the model when DistributedDataParallel was there already"
        return causes.LATE_PARAMETER, why
    return causes.WEIGHTS_APART, ""


def unequal_steps(case: Case) -> Iterator[Finding]:
    """Find ranks that have more batches than others, and wait for these in vain."""
    for epoch in case.other.training() if case.other.failure else ():
        # The launch may have ended in the midst of an epoch that is as long on all.
        lengths = {begun.batches for begun in epoch.begun}
        is_unequal = epoch.is_whole or len(lengths) > 1 or lengths == {0}
        if len(set(epoch.batches)) > 1 and is_unequal:
            shown = ", ".join(f"rank {rank}: {n}" for rank, n in enumerate(epoch.batches))
            what = f"the ranks have unequal numbers of batches in an epoch ({shown})"
            yield case.found(causes.UNEQUAL_STEPS, what)
            return


def waits_apart(case: Case) -> Iterator[Finding]:
    """Find ranks that wait for each other in different calls, or after unequal steps."""
    places = case.other.locations
    if len(set(places)) < 2:
        return
    calls = (_LINE.sub("", place) for place in places)
    shown = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
    what = f"the ranks wait for each other in different places ({shown})"
    lines = tuple(found[1] for place in places if (found := _LINE.search(place)))
    yield replace(case.found(causes.WAITS_APART, what), lines=lines)


def _by_step(events: Sequence[Event]) -> dict[int, Evaluated]:
    """Sort a rank's evaluations by the steps taken before."""
    found = dict[int, Evaluated]()
    for steps, event in counted(events):
        if isinstance(event, Evaluated):
            found.setdefault(steps, event)
    return found


def taken(scaled: Sequence[Scaled]) -> list[float]:
    """Give the loss scales of the steps that were taken."""
    return [event.scale for event in scaled if not event.skipped]


def _first_models(case: Case) -> list[ModelBuilt]:
    return [rank[0] for rank in case.other.of(ModelBuilt) if rank]


def _first_apart(ranks: Sequence[Mapping[str, str]]) -> tuple[int, str] | None:
    """Find the first rank, and a name, whose value isn't rank 0's."""
    for rank, own in enumerate(ranks):
        for name in (*ranks[0], *own):
            if own.get(name) != ranks[0].get(name):
                return rank, name
    return None
