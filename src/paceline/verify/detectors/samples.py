"""Faults in who sees which samples."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from paceline.options.figures import plural
from paceline.verify.detectors.figures import metrics_agree
from paceline.verify.finding import Case, Cause, Finding
from paceline.verify.trace import Pass

_MANY = 0.25
"""Samples seen by several ranks, as a part of all, above which the ranks don't share at all."""
_GROWS = 1.5
_FOLLOWS = 1.2
_SIGNIFICANT = 4
"""Samples of a rank whose order can't be the same by chance in two epochs (1 in 24)."""


def no_sampler(case: Case) -> Iterator[Finding]:
    """Find ranks that all go through the whole data set."""
    for epoch in case.other.training():
        if _shared_by_torch(epoch):
            continue
        twice = _shared(epoch)
        if twice > _MANY * len(epoch.counts):
            yield case.found(
                Cause.NO_SAMPLER,
                f"{twice} of {plural(len(epoch.counts), 'sample')} are seen by several ranks in "
                f"epoch {epoch.number}: the loader's {_sampler(epoch)} doesn't share them out",
                step=0,
            )
            return


def set_epoch(case: Case) -> Iterator[Finding]:
    """Find a shuffled order that is the same in every epoch."""
    epochs = [e for e in case.other.training() if e.begun and e.begun[0].shuffles]
    epochs.sort(key=lambda epoch: (epoch.loader, epoch.number))
    for one, two in pairwise(epochs):
        # Two epochs of one loader, compared as far as both were seen.
        pairs = [(a, b) for a, b in zip(one.samples, two.samples, strict=True) if a and b]
        shortest = min((min(len(a), len(b)) for a, b in pairs), default=0)
        same = all(_same_start(a, b) for a, b in pairs)
        if one.loader == two.loader and shortest >= _SIGNIFICANT and same:
            yield case.found(
                Cause.SET_EPOCH,
                f"epoch {two.number} has the same order as epoch {one.number}: the epoch of "
                f"{_sampler(two)} is {two.begun[0].epoch} in both",
            )
            return


def drop_last(case: Case) -> Iterator[Finding]:
    """Find samples of an epoch that more workers don't see."""
    passes = case.whole_passes()
    if passes is None:
        return
    mine, theirs = passes
    lost = sorted(set(mine.counts) - set(theirs.counts), key=_in_order)
    if not lost:
        return
    # Who drops: the loader, the sampler or both; ranks that share samples are another finding.
    dropping = [
        name
        for name, drops in (
            ("DataLoader", any(b.loader_drops for b in theirs.begun)),
            (_sampler(theirs), any(b.sampler_drops for b in theirs.begun)),
        )
        if drops
    ]
    number = f"{plural(len(lost), 'sample')} of {len(mine.counts)} never seen in epoch 0"
    if dropping and not _shared(theirs):
        by = " and ".join(f"{name}(drop_last=True)" for name in dropping)
        what = f"{number}: {by} drops what is left over ({_some(lost)})"
        yield case.found(Cause.DROP_LAST, what)
    elif not dropping and not _shared(theirs):
        what = f"{number} ({_some(lost)})"
        yield case.found(Cause.OTHER_SAMPLES, what)


def shares_overlap(case: Case) -> Iterator[Finding]:
    """Find ranks whose samplers divide different orders, or different parts of the data."""
    for epoch in case.other.training():
        if not (_shared_by_torch(epoch) and _shared(epoch)):
            continue
        # A seed or an epoch that isn't the same on all ranks, or a split.
        seeds, subsets = ([b.seed for b in epoch.begun], [b.subset for b in epoch.begun])
        orders = {"seeds": seeds, "epochs": [b.epoch for b in epoch.begun if b.shuffles]}
        differ = next((name for name, each in orders.items() if len(set(each)) > 1), "")
        if not differ and len(set(subsets)) == 1:
            continue
        number = f"{_shared(epoch)} of {plural(len(epoch.counts), 'sample')} seen by several ranks"
        if differ:
            shown = ", ".join(map(str, orders[differ]))
            what = f"{number}: the ranks' {_sampler(epoch)}s have different {differ} ({shown})"
            step = 0 if differ == "seeds" else None
            yield case.found(Cause.SHARES_OVERLAP, what, step=step)
        else:
            what = f"{number}: each rank shares out another part of the data set"
            places = case.other.places
            at = (*places.get("split", ()), *places.get("subset", ()))[:1]
            yield case.found(Cause.SHARES_OVERLAP, what, step=0, at="".join(at))
        return


def padded_training(case: Case) -> Iterator[Finding]:
    """Find samples that a sampler repeats to make equal shares."""
    epochs = [e for e in case.other.training() if e.is_whole and _shared_by_torch(e)]
    if any(shares_overlap(case)):
        return
    for epoch in epochs[:1]:
        repeated = _repeated(epoch)
        if repeated:
            yield case.found(
                Cause.PADDED_TRAINING,
                f"{plural(repeated, 'sample')} of {len(epoch.counts)} seen twice in an epoch: "
                f"{_sampler(epoch)} repeats some so that all ranks have as many",
            )


def padded_evaluation(case: Case) -> Iterator[Finding]:
    """Find samples that count twice in an evaluation."""
    if "gathered" in case.other.places and metrics_agree(case):
        return  # what is gathered may be cut to the data set's length, and was
    for found in case.other.evaluations():
        repeated = _repeated(found)
        whole_each = all(set(share) == set(found.counts) for share in found.samples)
        if found.is_whole and repeated and not whole_each:
            yield case.found(
                Cause.PADDED_EVALUATION,
                f"{plural(repeated, 'sample')} of {len(found.counts)} counted twice in an "
                f"evaluation: {_sampler(found)} repeats some so that all ranks have as many",
            )
            return


def dropped_evaluation(case: Case) -> Iterator[Finding]:
    """Find samples that an evaluation on fewer workers sees, and this one doesn't."""
    pairs = zip(case.first.evaluations(), case.other.evaluations(), strict=False)
    for mine, theirs in pairs:
        lost = sorted(set(mine.counts) - set(theirs.counts), key=_in_order)
        drops = any(begun.loader_drops or begun.sampler_drops for begun in theirs.begun)
        if lost and drops and mine.is_whole and theirs.is_whole:
            yield case.found(
                Cause.DROPPED_EVALUATION,
                f"{plural(len(lost), 'sample')} of {len(mine.counts)} left out of an evaluation: "
                f"drop_last=True drops the rest of each rank's share ({_some(lost)})",
            )
            return


def batch(case: Case) -> Iterator[Finding]:
    """Find a global batch that grows with the workers, and a learning rate that doesn't."""
    steps = case.first_steps()
    if steps is None:
        return
    (mine, theirs), samples = steps, [sum(step.shares) for step in steps]
    if not samples[0] or samples[1] < _GROWS * samples[0]:
        return
    # A larger batch wants a larger rate (linear scaling): whether the rate follows decides the
    # cause.
    rates = mine.stepped[0].rates[0], theirs.stepped[0].rates[0]
    grows = f"a step has {samples[1]} samples instead of {samples[0]}"
    if rates[1] < _FOLLOWS * rates[0]:
        what = f"{grows}, and the learning rate stays at {rates[1]:g}"
        yield case.found(Cause.RATE_STAYS, what, step=0)
    else:
        what = f"{grows}; the learning rate follows, from {rates[0]:g} to {rates[1]:g}"
        yield case.found(Cause.BATCH_GROWS, what, step=0)


def other_samples(case: Case) -> Iterator[Finding]:
    """Find steps that see other samples, or another number of them."""
    step = case.comparison.samples_differ_from
    if step is None:
        return
    counts = [sum(trace.steps[step].shares) for trace in (case.first, case.other)]
    workers = plural(case.first.workers, "worker")
    if counts[0] == counts[1]:
        what = f"step {step} sees other samples than on {workers}{_drawn_otherwise(case)}"
    else:
        what = f"step {step} sees {plural(counts[1], 'sample')}, on {workers} {counts[0]}"
    yield case.found(Cause.OTHER_SAMPLES, what, step=step)


def _shared_by_torch(found: Pass) -> bool:
    return any(begun.replicas > 1 for begun in found.begun)


def _drawn_otherwise(case: Case) -> str:
    """Name the samplers where others draw the samples, or shuffle; empty where they don't."""
    drawn = []
    for trace in (case.first, case.other):
        begun = next((e.begun[0] for e in trace.training() if e.begun), None)
        if begun is None:
            return ""
        drawn.append(f"{begun.sampler}, {'' if begun.shuffles else 'not '}shuffled")
    return "" if drawn[0] == drawn[1] else f": drawn by {drawn[1]}, there by {drawn[0]}"


def _sampler(found: Pass) -> str:
    return found.begun[0].sampler if found.begun else "loader"


def _shared(found: Pass) -> int:
    """Count the samples that several ranks have seen."""
    sets = [set(share) for share in found.samples]
    return sum(1 for sample in found.counts if sum(sample in share for share in sets) > 1)


def _repeated(found: Pass) -> int:
    return sum(count - 1 for count in found.counts.values())


def _same_start(one: Sequence[str], two: Sequence[str]) -> bool:
    return all(a == b for a, b in zip(one, two, strict=False))


def _in_order(sample: str) -> tuple[int, str]:
    return (int(sample), "") if sample.isdecimal() else (0, sample)


def _some(samples: Sequence[str]) -> str:
    more = len(samples) - 3
    shown = ", ".join(samples[:3])
    kind = "index" if samples[0].isdecimal() else "sample"
    return f"{kind} {shown}" + (f" and {more} more" if more > 0 else "")
