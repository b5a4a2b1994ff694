"""Faults in what a step makes of its samples: which are accused of what."""

import pytest

from paceline.verify.compare import compare, given_limits
from paceline.verify.detectors.steps import (
    batchnorm_share,
    no_mean_over_samples,
    rate_apart,
)
from paceline.verify.events import (
    Backward,
    Drawn,
    Event,
    ModelBuilt,
    Monitored,
    Normalised,
    PassEnded,
)
from paceline.verify.finding import Case
from paceline.verify.trace import Trace
from paceline.verify.verdict import evaluate_launch
from tests.verify.made import begun, stepped, trace_of


def normalising(ranks: int, parts: int, gradient: float) -> Trace:
    """Make a session's step of `parts` batches on every rank, with a BatchNorm."""
    events: list[list[Event]] = [
        [
            Normalised("norm"),
            *(Drawn(-1, 0, ("1",), (), True, rank * parts + n) for n in range(parts)),
            Backward(1.0),
            stepped(gradient),
        ]
        for rank in range(ranks)
    ]
    return trace_of(events)


@pytest.mark.parametrize(("parts", "accused"), [((4, 2), False), ((2, 1), False), ((1, 1), True)])
def test_a_batchnorm_over_shards_is_never_accused(parts: tuple[int, int], accused: bool) -> None:
    first = normalising(1 if accused else 4 // parts[0], parts[0], 1.0)
    other = normalising(1 if accused else 4 // parts[1], parts[1], 2.0)
    comparison = compare(first, other)
    beyond = comparison.first_beyond(given_limits(0.0))
    assert beyond is not None
    assert beyond.same_samples
    case = Case(first=first, other=other, comparison=comparison, beyond=beyond)
    assert bool(list(batchnorm_share(case))) == accused


def case_of(first: Trace, other: Trace, tolerance: float) -> Case:
    comparison = compare(first, other)
    beyond = comparison.first_beyond(given_limits(tolerance))
    return Case(first=first, other=other, comparison=comparison, beyond=beyond)


@pytest.mark.parametrize(("figures", "accused"), [((0.5, 0.5), False), ((0.5, 0.4), True)])
def test_a_schedule_that_follows_a_ranks_own_figure(
    figures: tuple[float, float], accused: bool
) -> None:
    other = trace_of([[stepped(1.0), Monitored(1.0), Monitored(f)] for f in figures])
    found = list(rate_apart(case_of(trace_of([[stepped(1.0)]]), other, 0.0)))
    assert [(str(f.cause), f.rank) for f in found] == [("rate-apart", 1)] * accused
    assert all(
        "call 2 gives the schedule 0.4 on rank 1, and 0.5 on rank 0" in f.what for f in found
    )


@pytest.mark.parametrize(("gradient", "accused"), [(1.0, False), (1.1, True)])
def test_samples_that_only_look_otherwise_are_not_chance(gradient: float, accused: bool) -> None:
    first, other = (
        trace_of([[Drawn(0, 0, ("1",), (look,)), Backward(1.0), stepped(size)]])
        for look, size in (("a", 1.0), ("b", gradient))
    )
    found = evaluate_launch(first, other, given_limits(1e-3)).findings
    assert ["data-draws"] * accused == [str(finding.cause) for finding in found]


@pytest.mark.parametrize(("whole", "accused"), [(3.21925, False), (3.218, True)])
def test_losses_that_barely_differ_before_anything_is_learned(whole: float, accused: bool) -> None:
    """As a model's are that still takes all words for equally likely."""
    first = trace_of([[Drawn(0, 0, ("1", "2"), ()), Backward(whole), stepped(1.0)]])
    other = trace_of(
        [
            [Drawn(0, 0, (sample,), ()), Backward(loss), stepped(1.1)]
            for sample, loss in (("1", 3.20044), ("2", 3.23806))
        ]
    )
    assert bool(list(no_mean_over_samples(case_of(first, other, 1e-3)))) == accused


def seen_twice(looks: tuple[str, str], gradient: float) -> Trace:
    """Make two epochs of four samples, which look as said in each."""
    events: list[Event] = []
    for epoch, look in enumerate(looks):
        events += [begun(0, epoch), Drawn(0, epoch, tuple("1234"), (look,) * 4), Backward(1.0)]
        events += [stepped(gradient), PassEnded(0, epoch, False)]
    return trace_of([events])


@pytest.mark.parametrize(
    ("first", "gradient", "accused"),
    [(("a", "a"), 1.1, True), (("a", "b"), 1.1, False), (("a", "a"), 1.0, False)],
)
def test_values_that_follow_the_workers_and_not_chance(
    first: tuple[str, str], gradient: float, accused: bool
) -> None:
    other = seen_twice(("c", "c"), gradient)
    found = evaluate_launch(seen_twice(first, 1.0), other, given_limits(1e-3)).findings
    named = [(str(f.cause), f.step) for f in found if str(f.cause) == "other-values"]
    assert named == [("other-values", 0)] * accused


@pytest.mark.parametrize(
    ("losses", "cause"),
    [((1.0, 4.0), []), ((1.0, 4.1), ["weighed-alike"]), ((1.0, 1.9), ["across-samples"])],
)
def test_a_sessions_losses_count_by_their_samples(
    losses: tuple[float, float], cause: list[str]
) -> None:
    """Of three samples, 2 + 1: their mean is 2."""
    first = trace_of([[Drawn(-1, 0, ("1", "2", "3"), ()), Backward(2.0), stepped(1.0)]])
    ranks = zip((("1", "2"), ("3",)), losses, (4 / 3, 2 / 3), strict=True)
    other = trace_of(
        [
            [
                ModelBuilt("session"),
                Drawn(-1, 0, samples, ()),
                Backward(loss, weight),
                stepped(1.1),
            ]
            for samples, loss, weight in ranks
        ]
    )
    found = list(no_mean_over_samples(case_of(first, other, 1e-3)))
    assert [str(finding.cause) for finding in found] == cause
    if cause == ["weighed-alike"]:  # what has the losses so isn't known: both are named
        assert "means over unequal numbers" in found[0].what
        assert "or model or loss sees a whole batch at once (padding" in found[0].what
        advice = found[0].cause
        assert "weight=items" in advice.paceline
        assert "fixed length" in advice.paceline
