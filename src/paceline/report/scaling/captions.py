"""What each picture shows for this study, in a sentence or two."""

from collections.abc import Sequence
from dataclasses import asdict

from paceline.options.figures import (
    listed,
    plural,
    show_loss,
    show_seconds,
    show_three_digits,
    show_times,
    show_whole_percent,
)
from paceline.report.scaling.convergence import loss_kind, reach_together
from paceline.report.scaling.series import (
    efficiency,
    find_methods,
    largest,
    method_name,
    one_worker,
    size_phrase,
    speed_up_of,
)
from paceline.results.profile import StepParts
from paceline.results.study import SizeResult, Study

PART_NAMES = {
    "data": "waiting for data",
    "forward": "forward",
    "backward": "backward",
    "exposed": "communication not hidden",
    "waiting": "waiting for the slowest",
    "optimizer": "optimizer",
    "other": "other",
}
FIXED_NAMES = {
    "evaluation_s": "evaluation",
    "snapshot_s": "snapshot",
    "loader_start_s": "loader start",
}

_CAUSES = {
    "data": "waiting for data",
    "forward": "a slower forward pass",
    "backward": "a slower backward pass",
    "exposed": "communication that isn't hidden behind computation",
    "waiting": "waiting for the slowest worker",
    "optimizer": "a slower optimizer step",
    "other": "work between the steps",
}
_HARDLY = 0.97
_MAX_NAMED = 4


def describe_throughput(study: Study) -> str:
    """Say how many times the work of one worker the largest size does."""
    top = largest(study)
    if not top:
        return "No size could be measured."
    if study.not_reliable:
        return study.not_reliable
    workers = plural(top[0].workers, "worker")
    fastest = show_three_digits(_median(top[0]))
    if study.baseline_images_per_s is None:
        does = "does" if top[0].workers == 1 else "do"
        return (
            f"{workers} {does} {fastest} images a second. What one worker does alone isn't known, "
            "so there is no ideal line."
        )
    # With one worker as the measure: one worker alone, one method, or several to compare.
    alone = show_three_digits(study.baseline_images_per_s)
    if top[0].workers == 1:
        return (
            f"One worker does {alone} images a second. How that scales takes a measurement "
            "with more workers."
        )
    if len(top) == 1:
        faster = show_times(speed_up_of(study, top[0]) or 0)
        return (
            f"{workers} do {faster} the work of one: {fastest} "
            f"images a second instead of {alone}. Ideal would be {top[0].workers:,} times."
        )
    each = [f"{show_times(speed_up_of(study, s) or 0)} with {method_name(study, s)}" for s in top]
    return f"{workers} do {_with_unit(each)}; one does {alone} images a second."


def describe_efficiency(study: Study) -> str:
    """Say how much of the ideal is left at the largest size, where the rest went, what may come."""
    top = [size for size in largest(study) if efficiency(study, size) is not None]
    if not top:
        return "Efficiency is against one worker's throughput, which wasn't measured."
    if study.not_reliable:
        return "Not reliable: no conclusion is drawn."
    sentences = [_reached(study, top)] if top[0].workers > 1 else [_ONE_WORKER]
    worst = top[-1]
    lost = describe_loss(study, worst) if worst.workers > 1 else ""
    if lost:
        name = f"With {method_name(study, worst)}, {lost[:1].lower()}{lost[1:]}"
        sentences.append(name if len(top) > 1 else lost)
    return " ".join([*sentences, *_expected(study)])


def describe_loss(study: Study, size: SizeResult) -> str:
    """Say what most of the lost efficiency went into; empty where that isn't known."""
    share, alone = efficiency(study, size), one_worker(study)
    if share is not None and share >= _HARDLY:
        return "Hardly anything is lost."
    if size.parts is None or size.step_s is None or alone is None or alone.parts is None:
        return ""
    lost = lost_by_part(study, alone.parts, size)
    name, most_s = max(lost.items(), key=lambda entry: entry[1])
    if most_s <= 0:
        return ""
    major = most_s > sum(lost.values()) / 2
    return (
        f"{'Most' if major else 'The largest part'} of what is lost is {_CAUSES[name]} "
        f"({show_seconds(most_s)} of {show_seconds(size.step_s.median)} a step)."
    )


def lost_by_part(study: Study, alone: StepParts, size: SizeResult) -> dict[str, float]:
    """Give the seconds by which each part of a step exceeds its ideal; none below zero."""
    # Strong scaling: the same batch over all workers, so each part's ideal shrinks.
    shrink = size.workers if study.mode == "strong" else 1
    parts = {} if size.parts is None else asdict(size.parts)
    ideal = asdict(alone)
    return {name: max(value - ideal[name] / shrink, 0.0) for name, value in parts.items()}


def describe_steps(study: Study) -> str:
    """Say what a step of the largest size takes, and how much of it is communication."""
    top = [size for size in largest(study) if size.step_s is not None]
    if not top:
        return "How long a step takes couldn't be measured."
    alone = one_worker(study)
    each = [show_seconds(size.step_s.median) for size in top if size.step_s is not None]
    if len(top) > 1:
        each = [f"{t} with {method_name(study, s)}" for t, s in zip(each, top, strict=True)]
    text = f"With {plural(top[0].workers, 'worker')} a step takes {listed(each)}"
    if alone is not None and alone.step_s is not None and top[0].workers > 1:
        text += f"; one worker's takes {show_seconds(alone.step_s.median)}"
    return f"{text}.{_communication(study, top)}"


def describe_fixed(study: Study) -> str:
    """Say what an epoch of the largest size costs besides its steps."""
    known = [size for size in study.measured if size.fixed.total_s is not None]
    if not known:
        return "No epoch ended while it was measured, so its fixed cost isn't known."
    top = max(known, key=lambda size: size.workers)
    share = top.fixed_share
    part = "" if share is None else f" ({show_whole_percent(share)} of the epoch)"
    named = [label for n, label in FIXED_NAMES.items() if getattr(top.fixed, n) is not None]
    return (
        f"Besides its steps, an epoch with {size_phrase(study, top)} takes "
        f"{show_seconds(top.fixed.total_s)}{part} for {listed(named)}. No way of combining "
        "gradients changes that."
    )


def describe_learning(study: Study, sizes: Sequence[SizeResult], across: str) -> str:
    """Say what it took to reach the loss that every training reached.

    Args:
        sizes: The trainings that the picture shows.
        across: `time` or `samples`.
    """
    reached = reach_together(study, sizes)
    if reached is None or len(sizes) < 2:
        return "How the loss falls over the " + (
            "training time." if across == "time" else "samples."
        )
    loss, points = reached
    common = f"a {loss_kind(study)} loss of {show_loss(loss)}"
    known = [
        (place, size)
        for point, size in zip(points, sizes, strict=True)
        if point and (place := point.time_s if across == "time" else point.samples) is not None
    ]
    if len(known) < 2:
        return f"All got down to {common}."
    if len(known) > _MAX_NAMED:
        known = [known[0], known[-1]]
    if across == "time":
        ends = [f"{size_phrase(study, size)} after {show_seconds(place)}" for place, size in known]
        return f"All got down to {common}: {listed(ends)}."
    # Samples are compared as multiples, since they don't depend on the machine.
    (first, size), *others = known
    factors = [place / first if first > 0 else 1.0 for place, _ in others]
    each = [
        f"{size_phrase(study, s)} needed {f:.1f}" for f, (_, s) in zip(factors, others, strict=True)
    ]
    return f"For {common}, {listed(each)} times the samples that {size_phrase(study, size)} needed."


_ONE_WORKER = "One worker alone is the measure: 100 %."


def _reached(study: Study, top: Sequence[SizeResult]) -> str:
    workers = plural(top[0].workers, "worker")
    shares = [show_whole_percent(efficiency(study, size)) for size in top]
    if len(top) == 1:
        return (
            f"With {workers} the efficiency is {shares[0]}: each does that share of what one does "
            "alone."
        )
    each = [f"{p} with {method_name(study, s)}" for p, s in zip(shares, top, strict=True)]
    return f"With {workers} the efficiency is {listed(each)}."


def _expected(study: Study) -> list[str]:
    """Say what is predicted for the most workers, beyond those that were measured."""
    most = max((size.workers for size in study.measured), default=0)
    methods = [m for m in find_methods(study) if m.predicted and m.predicted[-1].workers > most]
    if not methods:
        return []
    best = max(methods, key=lambda method: method.predicted[-1].efficiency)
    size = best.predicted[-1]
    name = f" with {best.label}" if len(methods) > 1 else ""
    low = show_whole_percent(size.low).removesuffix(" %")
    return [
        f"Predicted for {plural(size.workers, 'worker')}: "
        f"{show_whole_percent(size.efficiency)}{name} ({low} to {show_whole_percent(size.high)})."
    ]


def _communication(study: Study, top: Sequence[SizeResult]) -> str:
    known = [s for s in top if s.parts is not None and s.step_s is not None]
    if not known:
        return ""
    if known[0].workers == 1:
        return _longest_part(known[0])
    # The method with the most communication that isn't hidden.
    worst = max(known, key=lambda size: size.parts.exposed if size.parts else 0.0)
    if worst.parts is None or worst.step_s is None:
        return ""
    exposed_s = worst.parts.exposed
    share = exposed_s / worst.step_s.median
    if share < 0.01:
        return " Hardly any of it is communication that isn't hidden behind computation."
    share_text = f"{show_seconds(exposed_s)} ({show_whole_percent(share)})"
    named = (
        f"With {method_name(study, worst)} {share_text} of that"
        if len(top) > 1
        else f"Of it {share_text}"
    )
    return f" {named} are communication that isn't hidden behind computation."


def _longest_part(size: SizeResult) -> str:
    parts = {} if size.parts is None else asdict(size.parts)
    name, time_s = max(parts.items(), key=lambda entry: entry[1])
    return f" The longest part of it is {PART_NAMES[name]} ({show_seconds(time_s)})."


def _with_unit(each: Sequence[str]) -> str:
    """Write the unit after the first factor: `7.3 times the work of one with bf16 and ...`."""
    head, tail = each[0].split(" with ", 1)
    return listed([f"{head} the work of one with {tail}", *each[1:]])


def _median(size: SizeResult) -> float | None:
    return None if size.images_per_s is None else size.images_per_s.median
