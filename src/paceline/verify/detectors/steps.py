"""Faults in what a step makes of its samples."""

import math
from collections.abc import Iterator, Sequence

from paceline.options.figures import plural
from paceline.verify.finding import Case, Cause, Finding
from paceline.verify.tensor_sketch import TensorSketch, best_factor, contents_match
from paceline.verify.trace import Step

_RATES_APART = 1e-6
_EXACT = 1e-3
"""Of gradients that differ by a factor alone."""
_OF_LOSSES = 1e-5
"""Of a loss and the mean of its parts: of one kind of items, they are apart by rounding alone."""
_SURE = 4
"""Samples that have the same values a second time: then none is changed randomly."""
_NOISY, _ROUGH = 0.1, 0.25
"""Of losses and of gradients' norms, where a step draws random numbers."""


def schedule_per_worker(case: Case) -> Iterator[Finding]:
    """Find a schedule that is stepped once for each worker."""
    step = _rates_differ_from(case)
    # How often each launch's schedule was stepped, from its first to its last step.
    mine, theirs = (
        s.steps[-1].stepped[0].scheduled - s.steps[0].stepped[0].scheduled if s.steps else 0
        for s in (case.first, case.other)
    )
    if step is None:
        return
    rates = [s.steps[step].stepped[0].rates[0] for s in (case.first, case.other)]
    text = f"the learning rate of step {step} is {rates[1]:g} instead of {rates[0]:g}"
    if mine > 0 and theirs > mine and len(case.other.steps) <= len(case.first.steps):
        what = f"{text}: the schedule was stepped {theirs} times instead of {mine}"
        yield case.found(Cause.SCHEDULE_PER_WORKER, what, step=step)
    elif _same_first_batch(case):
        yield case.found(Cause.RATE_DIFFERS, text, step=step)


def rate_apart(case: Case) -> Iterator[Finding]:
    """Find schedules that follow each rank's own figure."""
    for number, figures in enumerate(zip(*case.other.monitored, strict=False)):
        rank = next((r for r, own in enumerate(figures) if _apart(own, figures[0])), None)
        if rank is not None:
            what = (
                f"call {number} gives the schedule {figures[rank]:.6g} on rank {rank}, and "
                f"{figures[0]:.6g} on rank 0: each rank's rate follows a figure of its own"
            )
            yield case.found(Cause.RATE_APART, what, rank=rank)
            return


def gradient_factor(case: Case) -> Iterator[Finding]:
    """Find gradients that are larger or smaller by the number of workers, in the first step."""
    steps, beyond = case.first_steps(), case.beyond
    if steps is None or beyond is None or beyond.step or not beyond.same_samples:
        return
    # Only the first step compares: later ones start from other weights.
    ratio, (mine, theirs) = case.workers / case.first.workers, steps
    pairs = [
        (a, b)
        for a, b in zip(mine.stepped[0].gradients, theirs.stepped[0].gradients, strict=False)
        if a is not None and b is not None
    ]
    # One factor for all gradients by least squares; `rest` is what it leaves unexplained.
    factor, rest = best_factor(pairs)
    is_exact = rest < _EXACT
    if _is_sum(mine, theirs, ratio) and (
        abs(factor / ratio - 1) < _EXACT if is_exact else _norms_agree(pairs, ratio)
    ):
        what = (
            f"the gradients of step 0 are {ratio:g} times too small{'' if is_exact else ', about'}:"
            f" the loss is a sum over samples, and the ranks' gradients are averaged"
        )
        yield case.found_beyond(Cause.GRADIENT_FACTOR, what)
    elif is_exact and abs(factor * ratio - 1) < _EXACT:
        what = f"the gradients of step 0 are {ratio:g} times too large: a sum over the ranks"
        yield case.found_beyond(Cause.GRADIENT_FACTOR, what)
    elif is_exact and abs(factor / ratio - 1) < _EXACT:
        what = f"the gradients of step 0 are {ratio:g} times too small: divided once too often"
        yield case.found_beyond(Cause.GRADIENT_FACTOR, what)


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
    beyond = case.beyond
    if beyond is None or case.other.in_session or not beyond.same_samples:
        return
    # A factor for all gradients explains the difference already.
    if any(gradient_factor(case)):
        return
    shares = case.other.steps[beyond.step].shares
    if len(set(shares)) > 1 and all(_equal_until(case, beyond.step)):
        shown = " + ".join(map(str, shares))
        yield case.found_beyond(
            Cause.MEAN_OF_MEANS,
            f"step {beyond.step} shares its samples as {shown}, and the gradients of all ranks "
            "count alike: a sample of the smaller share counts more",
        )


def no_mean_over_samples(case: Case) -> Iterator[Finding]:
    """Find losses that aren't means over samples: over items of unequal numbers, or over pairs."""
    beyond, in_session = case.beyond, case.other.in_session
    if beyond is None or not beyond.same_samples:
        return
    # Where random numbers differ between launches, so do losses.
    if not beyond.same_contents or any(e.by == "step" for e in case.other.drew[0]):
        return
    mine, theirs = case.first.steps[beyond.step], case.other.steps[beyond.step]
    if len(set(theirs.shares)) > 1 and not in_session:
        return
    if case.other.normalised or case.other.in_shards or any(gradient_factor(case)):
        return
    parts = theirs.losses
    whole, mean = (step.loss(by_samples=in_session) for step in (mine, theirs))
    if abs(whole - mean) <= _OF_LOSSES * abs(whole):
        return
    shown = " and ".join(f"{loss:.6g}" for loss in parts)
    counted = "by their samples" if in_session else "alike"
    # A mean over all items lies between the ranks' means, and is their mean only by equal weights.
    if min(parts) < whole < max(parts):
        # What is certain is that they don't add up; two things have it so.
        cause = Cause.WEIGHED_ALIKE
        why = "either they are means over unequal numbers of items (tokens, targets, weights of "
        why += "classes), or model or loss sees a whole batch at once (padding to its longest "
        why += "sample, Dice, pairs)"
    else:
        cause, why = Cause.ACROSS_SAMPLES, "it is no mean over samples. Does it compare those of a "
        why += "batch with each other?"
    yield case.found_beyond(
        cause,
        f"the ranks' losses of step {beyond.step} ({shown}) count {counted} and make {mean:.6g}, "
        f"but the loss of the same samples on {plural(case.first.workers, 'worker')} is "
        f"{whole:.6g}: {why}",
    )


def clipped_early(case: Case) -> Iterator[Finding]:
    """Find gradients that are clipped before all of them are there."""
    if case.beyond is not None and case.other.clips_early:
        yield case.found_beyond(
            Cause.CLIPPED_EARLY,
            f"gradients are clipped, and {case.other.clips_early[0]} before the step",
        )


def batchnorm_share(case: Case) -> Iterator[Finding]:
    """Find BatchNorms whose statistics are those of a share."""
    names, beyond = case.other.normalised, case.beyond
    if not names or beyond is None or not beyond.same_samples:
        return
    if case.first.in_shards or case.other.in_shards:
        return  # a shard has the same samples on any number of workers
    shares = case.other.steps[beyond.step].shares
    shown = " + ".join(map(str, shares)) if any(shares) else "a part"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    yield case.found_beyond(
        Cause.BATCHNORM_SHARE,
        f"the BatchNorm {names[0]}{more} takes mean and variance over each rank's share "
        f"({shown} samples), not over the batch",
    )


def no_gradient(case: Case) -> Iterator[Finding]:
    """Find parameters that an optimizer holds and no loss reaches."""
    if not case.other.steps:
        return
    reached: set[str] = set()
    # A parameter counts as reached if any step gave it a gradient.
    names: dict[str, None] = {}
    for step in case.other.steps:
        stepped = step.stepped[0]
        names |= dict.fromkeys(stepped.names)
        pairs = zip(stepped.names, stepped.gradients, strict=True)
        reached |= {name for name, gradient in pairs if gradient is not None}
    unused = [name for name in names if name not in reached]
    if unused:
        shown = ", ".join(unused[:3]) + (" ..." if len(unused) > 3 else "")
        yield case.found(
            Cause.NO_GRADIENT,
            f"{plural(len(unused), 'parameter')} without a gradient: {shown}",
            step=0,
            tensor=unused[0],
        )


def other_values(case: Case) -> Iterator[Finding]:
    """Find samples that are prepared otherwise, but not randomly: they are equal in each epoch."""
    step = case.comparison.contents_differ_from
    if step is None or case.beyond is None:
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
            Cause.OTHER_VALUES,
            f"from step {step} on the same samples have other values than on "
            f"{plural(case.first.workers, 'worker')}, where they have the same in every epoch",
            step=step,
        )


def chance(case: Case) -> Iterator[Finding]:
    """Find random numbers that other numbers of workers don't share: augmentation, noise."""
    step = case.comparison.contents_differ_from
    if case.beyond is None:
        return  # what differs, such as padding, makes no difference
    if step is not None:
        yield case.found(
            Cause.CHANCE,
            f"from step {step} on the same samples look otherwise than on "
            f"{plural(case.first.workers, 'worker')}: random numbers change them",
            step=step,
        )
    elif any(e.by == "step" for e in case.other.drew[0]):
        yield case.found(
            Cause.CHANCE,
            "the script draws random numbers in its steps, others on another number of workers",
            step=case.beyond.step,
        )


def _equal_until(case: Case, step: int) -> Iterator[bool]:
    return (len(set(found.shares)) == 1 for found in case.other.steps[:step])


def _same_first_batch(case: Case) -> bool:
    mine, theirs = case.first.steps[0], case.other.steps[0]
    return sum(mine.shares) == sum(theirs.shares)


def _apart(one: float, other: float) -> bool:
    return not math.isclose(one, other, rel_tol=_RATES_APART)


def _rates_differ_from(case: Case) -> int | None:
    pairs = zip(case.first.steps, case.other.steps, strict=False)
    for number, (mine, theirs) in enumerate(pairs):
        rates = zip(mine.stepped[0].rates, theirs.stepped[0].rates, strict=False)
        if any(abs(a - b) > _RATES_APART * max(abs(a), abs(b)) for a, b in rates):
            return number
    return None
