"""Two launches compared, step by step; and how far apart rounding alone may take them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from paceline.verify.tensor_sketch import TensorSketch, contents_match, distance, relative_distance
from paceline.verify.trace import Step, Trace

FACTOR = 32.0
"""How much further apart than the yardstick a launch may be. Two orders of one sum differ by some
bits in the last place, and by more where positive and negative terms cancel: gradients are
disturbed by 8 such bits, and this leaves room for cancellation by 5 bits more. A fault is far
above: a single sample too many among a thousand changes a gradient by 1e-3."""
CHAOS = 1e-2
"""Where rounding alone takes weights so far apart, further steps say nothing."""
LEAST = 1e-6
"""What counts as rounding in any case: weights are rounded by up to 6e-8 in every step."""


@final
@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """How far apart two launches are in one step, relative to the first one."""

    step: int
    """From 0."""
    same_samples: bool
    same_contents: bool
    """Whether the samples had the same values: the same augmentation."""
    loss: float
    gradients: float
    weights: float
    first_tensor: str
    """Whose gradient is furthest apart; empty where none is."""


@final
@dataclass(frozen=True, kw_only=True)
class Limits:
    """How far apart two launches may be, step by step."""

    gradients: tuple[float, ...]
    weights: tuple[float, ...]
    measured: bool
    """Whether they come from a perturbed launch; otherwise the user has given them."""

    def of_gradients(self, step: int) -> float:
        """Give the limit of a step's gradients."""
        return self.gradients[min(step, len(self.gradients) - 1)] if self.gradients else 0.0

    def of_weights(self, step: int) -> float:
        """Give the limit of the weights after a step."""
        return self.weights[min(step, len(self.weights) - 1)] if self.weights else 0.0


@final
@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A launch against the first one."""

    differences: tuple[StepDifference, ...]
    same_bits: bool

    @property
    def samples_differ_from(self) -> int | None:
        """The first step with other samples."""
        return next((d.step for d in self.differences if not d.same_samples), None)

    @property
    def contents_differ_from(self) -> int | None:
        """The first step whose samples have other values."""
        return next((d.step for d in self.differences if not d.same_contents), None)

    def worst(self, name: str) -> float:
        """Give the largest difference in `loss`, `gradients` or `weights`."""
        return max((float(getattr(d, name)) for d in self.differences), default=math.nan)

    def first_beyond(self, limits: Limits) -> StepDifference | None:
        """Find the first step in which more than rounding stands between the two.

        Steps after rounding alone has taken the weights far apart aren't judged.
        """
        for found in self.differences:
            over = found.gradients > limits.of_gradients(found.step)
            if over or found.weights > limits.of_weights(found.step):
                return found
            if limits.measured and limits.of_weights(found.step) > CHAOS * FACTOR:
                return None
        return None

    def first_difference(self, limits: Limits) -> tuple[int, list[str]] | None:
        """Find the first step with other samples, or with more than rounding between the two.

        Returns:
            The step, from 0, and what differs in it: `samples`, `augmentation`, `loss` and so on.
        """
        beyond = self.first_beyond(limits)
        found = (
            self.samples_differ_from,
            self.contents_differ_from,
            None if beyond is None else beyond.step,
        )
        steps = [step for step in found if step is not None]
        if not steps:
            return None
        first = next(d for d in self.differences if d.step == min(steps))
        gradients, weights = limits.of_gradients(first.step), limits.of_weights(first.step)
        differs = {
            "samples": not first.same_samples,
            "augmentation": not first.same_contents,
            "loss": first.loss > gradients,  # it has no limit of its own
            "gradients": first.gradients > gradients,
            "weights": first.weights > weights,
        }
        return first.step, [name for name, does in differs.items() if does]


def compare(first: Trace, other: Trace) -> Comparison:
    """Compare two launches, as far as both go and all is finite."""
    ends = [trace.breaks_at for trace in (first, other) if trace.breaks_at is not None]
    pairs = list(zip(first.steps, other.steps, strict=False))[: min(ends, default=None)]
    differences = tuple(_difference(n, one, two) for n, (one, two) in enumerate(pairs))
    return Comparison(
        differences=differences,
        same_bits=bool(differences)
        and all(d.gradients == 0 and d.weights == 0 for d in differences),
    )


def measured_limits(yardstick: Comparison) -> Limits:
    """Derive the limits from a launch and its perturbed copy: their differences, times a margin."""
    found = yardstick.differences
    return Limits(
        gradients=_risen([d.gradients for d in found]),
        weights=_risen([d.weights for d in found]),
        measured=True,
    )


def given_limits(tolerance: float) -> Limits:
    """Make limits of the tolerance that the user gives."""
    return Limits(gradients=(tolerance,), weights=(tolerance,), measured=False)


def _risen(sizes: Sequence[float]) -> tuple[float, ...]:
    risen: list[float] = []
    # Limits never fall: once apart, two trainings stay so.
    for size in sizes:
        finite = size if math.isfinite(size) else 0.0
        risen.append(max(finite * FACTOR, risen[-1] if risen else LEAST))
    return tuple(risen)


def _difference(number: int, one: Step, two: Step) -> StepDifference:
    # Rank 0's: after the exchange gradients and weights are the same on all ranks.
    mine, theirs = one.stepped[0], two.stepped[0]
    gradients = [
        (name, a, b)
        for name, a, b in zip(mine.names, mine.gradients, theirs.gradients, strict=False)
        if a is not None and b is not None
    ]
    ours, others = one.sample_contents, two.sample_contents
    return StepDifference(
        step=number,
        same_samples=one.all_samples == two.all_samples,
        same_contents=all(
            contents_match(others.get(sample, content), content) for sample, content in ours.items()
        ),
        loss=_loss_difference(one, two),
        gradients=relative_distance((a, b) for _, a, b in gradients),
        weights=relative_distance(zip(mine.weights, theirs.weights, strict=False)),
        first_tensor=_furthest(gradients),
    )


def _furthest(gradients: Sequence[tuple[str, TensorSketch, TensorSketch]]) -> str:
    apart = [(distance(a, b) / a.norm if a.norm else 0.0, name) for name, a, b in gradients]
    size, name = max(apart, default=(0.0, ""))
    return name if size else ""


def _loss_difference(one: Step, two: Step) -> float:
    mine = one.loss(by_samples=False)
    apart = abs(_nearest_loss(mine, two) - mine)
    if apart == 0:
        return 0.0
    return apart / abs(mine) if mine else math.inf


def _nearest_loss(mine: float, other: Step) -> float:
    """Give a loss over all ranks, whose losses a script may weight by itself: as is nearer."""
    return min((other.loss(by_samples=by) for by in (True, False)), key=lambda it: abs(it - mine))


def losses_of(trace: Trace, beside: Sequence[Step] = ()) -> list[float]:
    """Give the losses over all ranks, step by step.

    Args:
        beside: Steps of another one, from the same step on, that it is compared with.
    """
    own = [step.loss(by_samples=False) for step in trace.steps]
    near = [
        _nearest_loss(mine.loss(by_samples=False), step)
        for mine, step in zip(beside, trace.steps, strict=False)
    ]
    return [*near, *own[len(near) :]]
