"""Faults in who sees which samples."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from math import isfinite

from paceline.options.figures import listed, plural
from paceline.verify import causes
from paceline.verify.detectors.figures import drops_repeats
from paceline.verify.events import Drew, Wrote
from paceline.verify.finding import Case, Finding
from paceline.verify.source_lines import places
from paceline.verify.tensor_sketch import contents_match
from paceline.verify.trace import Pass, Trace

_MANY = 0.25
"""Samples seen too often, as a part of all, above which the ranks don't share at all."""
_GROWS = 1.5
_FOLLOWS = 1.2
_SIGNIFICANT = 4
"""Samples whose order, or values, can't be the same by chance in two epochs (1 in 24)."""
_DRAWN_SO = ("RandomSampler", "SequentialSampler", "DistributedSampler", "")


def no_sampler(case: Case) -> Iterator[Finding]:
    """Find ranks that all go through the whole data set."""
    for number, epoch in enumerate(case.other.training()):
        twice = sum(_excess(case, number).values())
        if _shared_by_torch(epoch) or not _shared(epoch) or twice <= _MANY * len(epoch.counts):
            continue
        sampler = _sampler(epoch)
        found = case.found(
            causes.NO_SAMPLER,
            f"{twice} of {plural(len(epoch.counts), 'sample')} are seen by several ranks in epoch "
            f"{number + 1}: the loader's {sampler} doesn't share them out",
            step=0,
        )
        yield (
            found
            if sampler in _DRAWN_SO
            else found.mended_by(
                f"draw {sampler}'s order on all ranks alike, by a generator with one seed, and let "
                "each rank take its part of it: order[rank::world_size]"
            )
        )
        return


def set_epoch(case: Case) -> Iterator[Finding]:
    """Find a shuffled order that is the same in every epoch."""
    epochs = [(n, e) for n, e in enumerate(case.other.training(), 1) if e.begun]
    for (first, one), (second, two) in pairwise(sorted(epochs, key=lambda e: (e[1].loader, e[0]))):
        # Two epochs of one loader, compared as far as both were seen.
        pairs = [(a, b) for a, b in zip(one.samples, two.samples, strict=True) if a and b]
        shortest = min((min(len(a), len(b)) for a, b in pairs), default=0)
        same = all(x == y for a, b in pairs for x, y in zip(a, b, strict=False))
        is_one = one.loader == two.loader and not two.begun[0].has_epoch
        if is_one and two.begun[0].shuffles and shortest >= _SIGNIFICANT and same:
            yield case.found(
                causes.SET_EPOCH,
                f"epoch {second} has the same order as epoch {first}: the epoch of "
                f"{_sampler(two)} is {two.begun[0].epoch} in both",
            )
            return


def epoch_ignored(case: Case) -> Iterator[Finding]:
    """Find data sets that the script changes between epochs, in readers that don't learn of it."""
    first, later = case.other.training()[:1], case.other.training()[1:]
    settings = {begun.settings for epoch in first for begun in epoch.begun}
    own = [b for e in later if e.loader == first[0].loader for b in e.begun]
    if not any(begun.persists and begun.settings not in settings for begun in own):
        return
    known = dict(first[0].sample_contents())
    pairs = (pair for epoch in later for pair in epoch.sample_contents())
    same = [contents_match(known[sample], content) for sample, content in pairs if sample in known]
    if len(same) >= _SIGNIFICANT and all(same):
        yield case.found(
            causes.EPOCH_IGNORED,
            "the script changes its data set between epochs, its readers persist, and the samples "
            "have the values of the first epoch in all of them",
        )


def drop_last(case: Case) -> Iterator[Finding]:
    """Find more samples of an epoch that more workers don't see."""
    passes = case.whole_passes()
    if passes is None or _shared(passes[1]):
        return
    mine, theirs = passes
    lost = sorted(set(mine.counts) - set(theirs.counts), key=_in_order)
    number = len(mine.counts) - len(theirs.counts)
    if number <= 0:
        return  # as many, of another order
    # Who drops: the loader, the sampler or both.
    dropping = [
        name
        for name, drops in (
            ("DataLoader", any(b.loader_drops for b in theirs.begun)),
            (_sampler(theirs), any(b.sampler_drops for b in theirs.begun)),
        )
        if drops
    ]
    text = f"{plural(number, 'sample')} of {len(mine.counts)} never seen in epoch 1"
    if dropping:
        by = " and ".join(f"{name}(drop_last=True)" for name in dropping)
        text += f": {by} drops what is left over"
    cause = causes.DROP_LAST if dropping else causes.OTHER_SAMPLES
    yield case.found(cause, f"{text} ({_some(lost)})")


def shares_overlap(case: Case) -> Iterator[Finding]:
    """Find ranks whose samplers divide different orders, or different parts of the data."""
    for epoch in case.other.training():
        if not (_shared_by_torch(epoch) and _shared(epoch)):
            continue
        # A seed or an epoch that isn't the same on all ranks, or a split.
        orders = {
            "seeds": [b.seed for b in epoch.begun],
            "epochs": [b.epoch for b in epoch.begun if b.shuffles],
        }
        differ = next((name for name, each in orders.items() if len(set(each)) > 1), "")
        if not differ and len({b.subset for b in epoch.begun}) == 1:
            continue
        number = f"{_shared(epoch)} of {plural(len(epoch.counts), 'sample')} seen by several ranks"
        if differ:
            shown = ", ".join(map(str, orders[differ]))
            what = f"{number}: the ranks' {_sampler(epoch)}s have different {differ} ({shown})"
            yield case.found(causes.SHARES_OVERLAP, what, step=0 if differ == "seeds" else None)
        else:
            what = f"{number}: each rank shares out another part of the data set"
            at = (*places("split", case.other), *places("subset", case.other))[:1]
            yield case.found(causes.SHARES_OVERLAP, what, step=0, at="".join(at))
        return


def padded_training(case: Case) -> Iterator[Finding]:
    """Find samples that are repeated to make equal shares."""
    epochs = case.other.training()
    if not epochs or not epochs[0].is_whole or any(shares_overlap(case)):
        return
    repeated, number = sum(_excess(case, 0).values()), len(epochs[0].counts)
    if repeated > 0 and (_shared_by_torch(epochs[0]) or repeated <= _MANY * number):
        yield case.found(
            causes.PADDED_TRAINING,
            f"{plural(repeated, 'sample')} of {number} seen twice in an epoch: "
            f"{_sampler(epochs[0])} repeats some so that all ranks have as many",
        )


def padded_evaluation(case: Case) -> Iterator[Finding]:
    """Find samples that count twice in an evaluation."""
    if drops_repeats(case):
        return
    first = case.first.evaluations()
    for number, found in enumerate(case.other.evaluations()):
        own = first[number].counts if number < len(first) else Counter[str]()
        repeated = (found.counts - (own | Counter(dict.fromkeys(found.counts, 1)))).total()
        whole_each = all(set(share) == set(found.counts) for share in found.samples)
        if found.is_whole and repeated and not whole_each:
            yield case.found(
                causes.PADDED_EVALUATION,
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
                causes.DROPPED_EVALUATION,
                f"{plural(len(lost), 'sample')} of {len(mine.counts)} left out of an evaluation: "
                f"drop_last=True drops the rest of each rank's share ({_some(lost)})",
            )
            return


def batch(case: Case) -> Iterator[Finding]:
    """Find a global batch that grows with the workers, and a learning rate that doesn't."""
    samples = [sum(trace.steps[0].shares) for trace in case.traces]
    if not samples[0] or samples[1] < _GROWS * samples[0]:
        return
    # A larger batch wants a larger rate (linear scaling), after as many turns of the schedule. A
    # warm-up begins small: the highest one counts.
    known = [_rates(trace) for trace in case.traces]
    common = known[0].keys() & known[1].keys()
    rates = [max(rates[turns] for turns in common) for rates in known] if common else [0.0, 0.0]
    grows = f"a step has {samples[1]} samples instead of {samples[0]}"
    shown = f"{rates[0]:g} on {case.first_workers}, here {rates[1]:g}"
    if rates[1] < _FOLLOWS * rates[0] or not common:
        what = f"{grows}, and the learning rate stays as it is ({shown})"
        yield case.found(causes.RATE_STAYS, what, step=0)
    else:
        what = f"{grows}; the learning rate follows ({shown})"
        yield case.found(causes.BATCH_GROWS, what, step=0)


def _rates(trace: Trace) -> dict[int, float]:
    """Give the highest learning rate after each number of turns of the schedule."""
    found = dict[int, float]()
    for stepped in (step.stepped[0] for step in trace.steps):
        found[stepped.scheduled] = max(found.get(stepped.scheduled, 0.0), stepped.rates[0])
    return found


def batch_skipped(case: Case) -> Iterator[Finding]:
    """Find ranks that each leave batches out by themselves."""
    for number, step in enumerate(case.other.steps):
        counts = [len(skipped) for skipped in step.skipped]
        if len(set(counts)) > 1:
            if not places("continue", case.other):
                return  # steps may be of several batches that a script packs together
            rank = counts.index(max(counts))
            what = (
                f"rank {rank} takes a batch before step {number + 1} and doesn't train on it, "
                f"rank {counts.index(min(counts))} does with its own"
            )
            yield case.found(causes.BATCH_SKIPPED, what, step=number, rank=rank)
            return


def decided_by_one(case: Case) -> Iterator[Finding]:
    """Find a batch that is left out on one of the two numbers of workers, and not on the other."""
    for number, pair in enumerate(zip(case.first.steps, case.other.steps, strict=False)):
        left_out = [sorted(i for rank in s.skipped for d in rank for i in d.samples) for s in pair]
        trained = [step.all_samples for step in pair]
        if trained[1] == left_out[0] != [] or trained[0] == left_out[1] != []:
            does = "trains on" if trained[1] == left_out[0] else "leaves out"
            yield case.found(
                causes.DECIDED_BY_ONE,
                f"step {number + 1} {does} a batch, other than on "
                f"{case.first_workers}: a rank decides by its own share",
                step=number,
            )
        if any(left_out):
            return


def not_finite(case: Case) -> Iterator[Finding]:
    """Find what isn't finite."""
    mine, theirs = (trace.breaks_at for trace in case.traces)
    if theirs is None:
        if mine is not None:
            what = f"on {case.first_workers} {_infinite(case.first, mine)}"
            found = case.found(causes.NOT_FINITE, f"{what}; here everything is", step=mine)
            yield replace(found, differs=True)
        return
    step, what = case.other.steps[theirs], _infinite(case.other, theirs)
    apart = [rank for rank, loss in enumerate(step.losses) if not isfinite(loss)]
    found = case.found(causes.NOT_FINITE, what, step=theirs, rank=apart[0] if apart else None)
    yield replace(found, differs=mine != theirs)


def _infinite(trace: Trace, number: int) -> str:
    found = trace.steps[number].infinite
    data = [
        n for n, rank in enumerate(trace.steps[number].drawn) if not all(d.finite for d in rank)
    ]
    of_data = f" (the batch of rank {listed(list(map(str, data)))} isn't finite)" if data else ""
    return f"{listed([*found[:2]])} of step {number + 1} isn't finite{of_data}"


def other_samples(case: Case) -> Iterator[Finding]:
    """Find steps that see other samples, or another number of them."""
    step = case.comparison.samples_differ_from
    if step is None:
        return
    counts = [sum(trace.steps[step].shares) for trace in case.traces]
    workers = case.first_workers
    drawn = any(event.by.startswith("data") for event in case.other.by_rank_0(Drew))
    by_values = not all(map(str.isdecimal, case.other.steps[step].all_samples))
    if counts[0] == counts[1] and drawn and by_values:
        what = f"from step {step + 1} on samples are unknown: random numbers change their values"
        yield case.found(causes.CHANCE, what, step=step)
        return
    if counts[0] == counts[1]:
        what = f"step {step + 1} sees other samples than on {workers}{_drawn_otherwise(case)}"
    else:
        what = f"step {step + 1} sees {plural(counts[1], 'sample')}, on {workers} {counts[0]}"
    yield case.found(causes.OTHER_SAMPLES, what, step=step)


def file_race(case: Case) -> Iterator[Finding]:
    """Find files that several ranks write before they could have agreed on who does."""
    early = [{e.path: e.at for e in rank if e.before_group} for rank in case.other.of(Wrote)]
    written = Counter(path for own in early for path in own)
    for path, ranks in written.items():
        if ranks > 1:
            at = next(own[path] for own in early if path in own)
            what = f"{ranks} ranks write {path} before the process group is there"
            yield case.found(causes.FILE_RACE, what, at=at)
            return


def _excess(case: Case, number: int) -> Counter[str]:
    """Count how much more often samples are seen in an epoch than on the first number."""
    mine, theirs = case.first.training(), case.other.training()
    counts = theirs[number].counts
    if case.comparison.samples_differ_from is None or len(mine) <= number:
        return Counter()
    once = Counter(dict.fromkeys(counts, 1))
    return counts - (mine[number].counts | once)


def _shared_by_torch(found: Pass) -> bool:
    return any(begun.replicas > 1 for begun in found.begun)


def _drawn_otherwise(case: Case) -> str:
    """Name the samplers where others draw the samples, or shuffle; empty where they don't."""
    drawn = []
    for trace in case.traces:
        begun = next((e.begun[0] for e in trace.training() if e.begun), None)
        if begun is None:
            return ""
        drawn.append(f"{begun.sampler}, {'' if begun.shuffles else 'not '}shuffled")
    return "" if drawn[0] == drawn[1] else f": drawn by {drawn[1]}, there by {drawn[0]}"


def _sampler(found: Pass) -> str:
    return found.begun[0].sampler if found.begun else "loader"


def _shared(found: Pass) -> int:
    """Count the samples that several ranks have seen."""
    seen = Counter(sample for share in found.samples for sample in set(share))
    return sum(ranks > 1 for ranks in seen.values())


def _in_order(sample: str) -> tuple[int, str]:
    return (int(sample), "") if sample.isdecimal() else (0, sample)


def _some(samples: Sequence[str]) -> str:
    more = len(samples) - 3
    shown = ", ".join(samples[:3])
    kind = "index" if samples[0].isdecimal() else "sample"
    return f"{kind} {shown}" + (f" and {more} more" if more > 0 else "")
