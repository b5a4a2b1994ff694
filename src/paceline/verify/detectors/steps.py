"""Faults in what a step makes of its samples."""

import math
from collections.abc import Iterator, Sequence

from paceline.options.figures import plural
from paceline.verify import causes
from paceline.verify.events import (
    Backward,
    Clipped,
    Combined,
    Drew,
    Monitored,
    Moved,
    Normalised,
    Scaled,
    Stepped,
)
from paceline.verify.finding import Case, Finding
from paceline.verify.tensor_sketch import TensorSketch, best_factor, contents_match
from paceline.verify.trace import Step, Trace

_GROWS = 1.2
_RATES_APART = 1e-6
_EXACT = 1e-3
"""Of gradients that differ by a factor alone."""
_OF_LOSSES = 1e-5
"""Of a loss and the mean of its parts: of one kind of items, they are apart by rounding alone."""
_SURE = 4
"""Samples that have the same values a second time: then none is changed randomly."""
_NOISY, _ROUGH = 0.1, 0.25
"""Of losses and of gradients' norms, where a step draws random numbers."""


def schedule(case: Case) -> Iterator[Finding]:
    """Find a schedule that is stepped once for each worker, or that follows their number."""
    step, sizes = _rates_differ_from(case), [sum(trace.steps[0].shares) for trace in case.traces]
    if step is None or sizes[1] > _GROWS * sizes[0]:
        return  # a larger batch, of which a schedule by samples takes more at once
    groups = [trace.steps[step].stepped[0].rates for trace in case.traces]
    rates = next(pair for pair in zip(*groups, strict=False) if apart(*pair))
    text = f"the learning rate of step {step + 1} is {rates[1]:g} instead of {rates[0]:g}"
    mine, theirs = map(_turns, case.traces)
    if theirs > _GROWS * mine > 0:
        what = f"{text}: the schedule is stepped {theirs:g} times a step instead of {mine:g}"
        yield case.found(causes.SCHEDULE_PER_WORKER, what, step=step)
    elif sizes[0] == sizes[1]:
        yield case.found(causes.RATE_DIFFERS, text, step=step)


def rate_apart(case: Case) -> Iterator[Finding]:
    """Find schedules that follow each rank's own figure."""
    for number, given in enumerate(zip(*case.other.of(Monitored), strict=False), 1):
        own = [event.figure for event in given]
        rank = next((r for r, figure in enumerate(own) if apart(figure, own[0])), None)
        if rank is not None:
            what = (
                f"call {number} gives the schedule {own[rank]:.6g} on rank {rank}, and "
                f"{own[0]:.6g} on rank 0: each rank's rate follows a figure of its own"
            )
            yield case.found(causes.RATE_APART, what, rank=rank)
            return


def gradient_factor(case: Case) -> Iterator[Finding]:
    """Find gradients that are larger or smaller by the number of workers, in the first step."""
    if case.beyond is None or case.beyond.step:
        return
    # Only the first step compares: later ones start from other weights.
    ratio, (mine, theirs) = case.ratio, (trace.steps[0] for trace in case.traces)
    pairs = [
        (a, b)
        for a, b in zip(mine.stepped[0].gradients, theirs.stepped[0].gradients, strict=False)
        if a is not None and b is not None
    ]
    # One factor for all gradients by least squares; `rest` is what it leaves unexplained.
    factor, rest = best_factor(pairs)
    is_exact, why = rest < _EXACT, ""
    if _is_sum(mine, theirs, ratio) and (
        abs(factor / ratio - 1) < _EXACT if is_exact else _norms_agree(pairs, ratio)
    ):
        about = "" if is_exact else ", about"
        why = f"small{about}: the loss is a sum over samples, and the ranks' gradients are averaged"
    elif is_exact and abs(factor * ratio - 1) < _EXACT:
        why = "large: a sum over the ranks"
    elif is_exact and abs(factor / ratio - 1) < _EXACT:
        why = "small: divided once too often"
    if why:
        what = f"the gradients of step 1 are {ratio:g} times too {why}"
        yield case.found_beyond(causes.GRADIENT_FACTOR, what)


def _is_sum(mine: Step, theirs: Step, ratio: float) -> bool:
    """Tell whether the ranks' losses add up to the loss on fewer workers, rather than average."""
    total, other = sum(mine.losses), sum(theirs.losses)
    return bool(total) and abs(other / total - 1) < _NOISY and abs(ratio - 1) > 2 * _NOISY


def _norms_agree(pairs: Sequence[tuple[TensorSketch, TensorSketch]], ratio: float) -> bool:
    """Tell the same by sizes, where noise or BatchNorm makes gradients differ besides."""
    mine, theirs = (math.hypot(*(pair[n].norm for pair in pairs)) for n in (0, 1))
    return bool(theirs) and abs(mine / theirs / ratio - 1) < _ROUGH


def mean_of_means(case: Case) -> Iterator[Finding]:
    """Find ranks with unequal shares whose gradients count alike."""
    # A factor for all gradients explains the difference already.
    if case.beyond is None or any(gradient_factor(case)):
        return
    step = case.beyond.step
    shares = case.other.steps[step].shares
    if len(set(shares)) > 1 and all(len(set(s.shares)) == 1 for s in case.other.steps[:step]):
        shown = " + ".join(map(str, shares))
        yield case.found_beyond(
            causes.MEAN_OF_MEANS,
            f"step {step + 1} shares its samples as {shown}, and the gradients of all ranks count "
            "alike: a sample of the smaller share counts more",
        )


def no_mean_over_samples(case: Case) -> Iterator[Finding]:
    """Find losses that aren't means over samples: over items of unequal numbers, or over pairs."""
    beyond, in_session = case.beyond, case.other.in_session
    # Where random numbers differ between launches, so do losses.
    if beyond is None or not beyond.same_contents or _draws_in_steps(case.other):
        return
    mine, theirs = (trace.steps[beyond.step] for trace in case.traces)
    if len(set(theirs.shares)) > 1 and not in_session:
        return
    if _normalised(case.other) or case.other.in_shards or any(gradient_factor(case)):
        return
    parts = theirs.losses
    whole, mean = (step.loss(by_samples=in_session) for step in (mine, theirs))
    if abs(whole - mean) <= _OF_LOSSES * abs(whole):
        return
    # A mean over all items lies between the ranks' means, and is their mean only by equal weights.
    if min(parts) < whole < max(parts):
        # What is certain is that they don't add up; two things have it so.
        cause = causes.WEIGHED_ALIKE
        why = (
            "either they are means over unequal numbers of items (tokens, targets, weights of "
            "classes), or model or loss sees a whole batch at once (padding to its longest sample, "
            "Dice, pairs)"
        )
    else:
        cause = causes.ACROSS_SAMPLES
        why = (
            "it is no mean over samples. Does it compare those of a batch with each other, or "
            "weigh them by what is counted in a rank's share (classes)?"
        )
    shown = " and ".join(f"{loss:.6g}" for loss in parts)
    yield case.found_beyond(
        cause,
        f"the ranks' losses of step {beyond.step + 1} ({shown}) count "
        f"{'by their samples' if in_session else 'alike'} and make {mean:.6g}, but the loss of the "
        f"same samples on {case.first_workers} is {whole:.6g}: {why}",
    )


def clipped_early(case: Case) -> Iterator[Finding]:
    """Find gradients that are clipped before all of them are there."""
    is_clipped = False
    for event in case.other.ranks[0]:
        is_clipped = (is_clipped and not isinstance(event, Stepped)) or isinstance(event, Clipped)
        is_clipped = is_clipped and not (isinstance(event, Scaled) and event.skipped)
        adds = isinstance(event, Backward) and event.adds
        if is_clipped and (adds or isinstance(event, Combined)):
            after = (
                "another backward pass adds to them"
                if isinstance(event, Backward)
                else "the ranks' gradients are combined"
            )
            what = f"gradients are clipped, and {after} before the step"
            yield case.found_beyond(causes.CLIPPED_EARLY, what)
            return


def moved_per_micro_batch(case: Case) -> Iterator[Finding]:
    """Find tensors outside of the optimizer that move with every micro-batch."""
    moved = [event for trace in case.traces for event in trace.by_rank_0(Moved)]
    passes = [len(trace.steps[0].backwards[0]) for trace in case.traces]
    if moved and passes[0] != passes[1]:
        yield case.found(
            causes.MOVED_PER_MICRO_BATCH,
            f"{moved[0].names[0]}, which no optimizer holds, moves with each backward pass, of "
            f"which a step has {passes[1]}, on {case.first_workers} {passes[0]}",
            step=0,
            tensor=moved[0].names[0],
            at=moved[0].at,
        )


def window_left_open(case: Case) -> Iterator[Finding]:
    """Find gradients of an epoch's end that the next epoch's first step takes as well."""
    for trace in (case.other, case.first):
        passes = [len(step.backwards[0]) for step in trace.steps]
        spanning = [number for number, step in enumerate(trace.steps) if _spans(step)]
        usual = max((n for number, n in enumerate(passes) if number not in spanning), default=0)
        for number in spanning:
            if passes[number] > usual > 0:
                on = "" if trace is case.other else f" on {plural(trace.workers, 'worker')}"
                yield case.found(
                    causes.WINDOW_LEFT_OPEN,
                    f"step {number + 1} has {passes[number]} backward passes{on}, others at most "
                    f"{usual}: gradients of the epoch before are still there",
                    step=number,
                )
                return


def _spans(step: Step) -> bool:
    """Tell whether rank 0's batches are of several passes over one loader."""
    epochs = {(batch.loader, batch.number) for batch in step.drawn[0]}
    return len(epochs) > len({loader for loader, _ in epochs})


def batchnorm_share(case: Case) -> Iterator[Finding]:
    """Find BatchNorms whose statistics are those of a share."""
    names = _normalised(case.other)
    if not names or case.beyond is None or any(trace.in_shards for trace in case.traces):
        return  # a shard has the same samples on any number of workers
    shares = case.other.steps[case.beyond.step].shares
    shown = " + ".join(map(str, shares)) if any(shares) else "a part"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    yield case.found_beyond(
        causes.BATCHNORM_SHARE,
        f"the BatchNorm {names[0]}{more} takes mean and variance over each rank's share "
        f"({shown} samples), not over the batch",
    )


def other_values(case: Case) -> Iterator[Finding]:
    """Find samples that are prepared otherwise, but not randomly: they are equal in each epoch."""
    step = case.comparison.contents_differ_from
    if step is None:
        return
    known: dict[str, str] = {}
    again = 0
    # Random augmentation gives a sample other values in each epoch: then they tell nothing.
    for epoch in case.first.training():
        for sample, content in epoch.sample_contents():
            again += sample in known
            if not contents_match(known.setdefault(sample, content), content):
                return
    # Enough samples were seen twice to be sure that they are prepared without chance.
    if again >= _SURE:
        yield case.found(
            causes.OTHER_VALUES,
            f"from step {step + 1} on the same samples have other values than on "
            f"{case.first_workers}, where they have the same in every epoch",
            step=step,
        )


def chance(case: Case) -> Iterator[Finding]:
    """Find random numbers that other numbers of workers don't share: augmentation, noise."""
    step = case.comparison.contents_differ_from
    if step is not None:
        drawn = any(event.by.startswith("data") for event in case.other.by_rank_0(Drew))
        why = "random numbers change them" if drawn else "by generators of the data set's own"
        yield case.found(
            causes.CHANCE if drawn else causes.DATA_DRAWS,
            f"from step {step + 1} on the same samples look otherwise than on "
            f"{case.first_workers}: {why}",
            step=step,
        )
    elif _draws_in_steps(case.other):
        yield case.found_beyond(
            causes.CHANCE,
            "the script draws random numbers in its steps, others on another number of workers",
        )


def unknown(case: Case) -> Iterator[Finding]:
    """Say where more than rounding stands between the two, and nothing explains it."""
    if (beyond := case.beyond) is not None:
        yield case.found_beyond(
            causes.UNKNOWN,
            f"the gradients of step {beyond.step + 1} are apart by {beyond.gradients:.1e}, the "
            f"weights after it by {beyond.weights:.1e}, most of all "
            f"{beyond.first_tensor or 'by weights'}",
        )


def _draws_in_steps(trace: Trace) -> bool:
    return any(event.by == "step" for event in trace.by_rank_0(Drew))


def _normalised(trace: Trace) -> list[str]:
    """Name the BatchNorms that see their own share only."""
    return list(dict.fromkeys(event.module for event in trace.by_rank_0(Normalised)))


def _turns(trace: Trace) -> float:
    """Give how often the schedule was stepped for each step, from the first to the last."""
    first, last = (trace.steps[n].stepped[0].scheduled for n in (0, -1))
    return (last - first) / max(1, len(trace.steps) - 1)


def apart(one: float, other: float) -> bool:
    """Tell whether two numbers are further apart than rounding takes them."""
    return str(one) != str(other) and not math.isclose(one, other, rel_tol=_RATES_APART)


def _rates_differ_from(case: Case) -> int | None:
    pairs = zip(case.first.steps, case.other.steps, strict=False)
    for number, (mine, theirs) in enumerate(pairs):
        rates = zip(mine.stepped[0].rates, theirs.stepped[0].rates, strict=False)
        if any(apart(a, b) for a, b in rates):
            return number
    return None
