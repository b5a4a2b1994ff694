"""Launches beside each other: bits, rounding, more than rounding."""

import math

import pytest

from paceline.verify.compare import (
    CHAOS,
    FACTOR,
    Limits,
    compare,
    given_limits,
    losses_of,
    measured_limits,
)
from paceline.verify.events import PassEnded
from paceline.verify.trace import Trace
from paceline.verify.verdict import Verdict, evaluate_launch, needs_yardstick
from tests.verify.made import begun, launch, trace_of, trained

SAMPLES = ["1", "2"], ["3", "4"]


def steps_with(gradients: list[float], weights: list[float], loss: float = 1.0):  # type: ignore[no-untyped-def]
    rows = zip(SAMPLES, gradients, weights, strict=True)
    return launch([trained(s, loss, g, w) for s, g, w in rows])


FIRST = steps_with([1.0, 2.0], [1.0, 1.5])


def test_the_same_bits() -> None:
    found = evaluate_launch(FIRST, FIRST, given_limits(0.0))
    assert found.verdict == Verdict.SAME_BITS
    assert not needs_yardstick(FIRST, [FIRST])


def test_sizes_are_relative_and_by_step() -> None:
    other = steps_with([1.0, 2.2], [1.0, 1.5 * (1 + 2**-20)])
    comparison = compare(FIRST, other)
    assert comparison.differences[0].gradients == 0
    assert comparison.differences[1].gradients == pytest.approx(0.1, rel=0.5)
    assert comparison.worst("weights") == pytest.approx(2**-20, rel=0.5)
    assert comparison.differences[1].first_tensor == "w"
    assert not comparison.same_bits
    assert needs_yardstick(FIRST, [other])


def test_rounding_is_what_the_yardstick_says() -> None:
    other = steps_with([1.0, 2.0 * (1 + 1e-4)], [1.0, 1.5])
    disturbed = steps_with([1.0, 2.0 * (1 + 1e-5)], [1.0, 1.5])
    wide, narrow = measured_limits(compare(FIRST, disturbed)), given_limits(1e-6)
    assert evaluate_launch(FIRST, other, wide).verdict == Verdict.ROUNDING
    found = evaluate_launch(FIRST, other, narrow)
    assert found.verdict == Verdict.DIFFERENT
    assert [(str(f.cause), f.step, f.tensor) for f in found.findings] == [("unknown", 1, "w")]
    far = steps_with([1.0, 2.0 * (1 + 1e-5 * FACTOR * 4)], [1.0, 1.5])
    assert evaluate_launch(FIRST, far, wide).verdict == Verdict.DIFFERENT


def test_limits_only_rise() -> None:
    disturbed = steps_with([1.001, 2.0], [1.001, 1.5])
    limits = measured_limits(compare(FIRST, disturbed))
    assert limits.of_weights(1) == limits.of_weights(0) > 1e-3
    assert limits.of_gradients(9) == limits.of_gradients(1)


def test_each_step_has_a_limit_of_its_own() -> None:
    other = steps_with([1.0 * (1 + 1e-3), 2.0 * (1 + 1e-3)], [1.0, 1.5])
    limits = Limits(gradients=(1e-6, 1.0), weights=(1e-6, 1.0), measured=False)
    beyond = compare(FIRST, other).first_beyond(limits)
    assert beyond is not None
    assert beyond.step == 0


@pytest.mark.parametrize("measured", [True, False])
def test_after_chaos_nothing_is_judged_by_what_was_measured(measured: bool) -> None:
    """Where rounding alone takes weights that far, what follows says nothing of the script."""
    other = steps_with([1.0, 3.0], [1.0 * (1 + 1e-9), 4.0])
    limits = Limits(gradients=(1.0, 1e-9), weights=(2 * CHAOS * FACTOR, 1e-9), measured=measured)
    beyond = compare(FIRST, other).first_beyond(limits)
    assert (beyond is None) == measured


def test_without_a_step_no_bits_are_the_same() -> None:
    assert not compare(FIRST, launch([])).same_bits


def test_one_equal_step_doesnt_make_the_same_bits() -> None:
    assert not compare(FIRST, steps_with([1.0, 2.0], [1.0, 1.5000001])).same_bits


def test_a_lost_gradient_and_a_loss_of_zero() -> None:
    zero = steps_with([0.0, 0.0], [1.0, 1.5], loss=0.0)
    found = compare(zero, FIRST).differences[0]
    assert found.gradients == math.inf
    assert found.loss == math.inf


def test_nothing_to_compare() -> None:
    assert evaluate_launch(FIRST, launch([]), given_limits(0.0)).verdict == Verdict.NOTHING


@pytest.mark.parametrize(
    ("other", "step", "quantities"),
    [
        (steps_with([1.0, 2.2], [1.0, 1.6]), 1, ("gradients", "weights")),
        (steps_with([1.0, 2.0], [1.0, 1.6]), 1, ("weights",)),
        (steps_with([1.5, 2.2], [1.0, 1.6], loss=2.0), 0, ("loss", "gradients")),
        (
            launch([trained(["1", "5"], 1.0, 1.0, 1.0), trained(SAMPLES[1], 1.0, 3.0, 1.5)]),
            0,
            ("samples",),
        ),
    ],
)
def test_the_first_step_that_differs_and_in_what(
    other: Trace, step: int, quantities: tuple[str, ...]
) -> None:
    found = compare(FIRST, other).first_difference(given_limits(1e-6))
    assert found == (step, list(quantities))
    assert compare(FIRST, other).first_difference(given_limits(10.0)) == (
        found if "samples" in quantities else None
    )


def test_losses_are_those_of_all_ranks_as_they_compare_best() -> None:
    """A script may average its ranks' losses, or weight them by their samples (1 + 3 here)."""
    alone = launch([trained(["1", "2", "3", "4"], 1.75, 1.0)])
    ranks = [trained(["1"], 1.0, 1.0), trained(["2", "3", "4"], 2.0, 1.0)]
    both = trace_of([[begun(0, 0), *events, PassEnded(0, 0, False)] for events in ranks])
    assert losses_of(alone) == [1.75]
    assert losses_of(both) == [1.5]
    assert losses_of(both, alone.steps) == [1.75]
