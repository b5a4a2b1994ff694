"""Faults in what a step makes of its samples: which are accused of what."""

import pytest

from paceline.verify.compare import compare, given_limits
from paceline.verify.detectors.steps import batchnorm_share
from paceline.verify.events import Backward, Drawn, Event, Normalised
from paceline.verify.finding import Case
from paceline.verify.trace import Trace, collect_trace
from tests.verify.made import stepped


def normalising(ranks: int, parts: int, gradient: float) -> Trace:
    """Make a session's step of `parts` batches on every rank, with a BatchNorm."""
    events: list[list[Event]] = [
        [
            Normalised("norm", 0),
            *(Drawn(-1, 0, ("1",), (), True, 4, rank * parts + n) for n in range(parts)),
            Backward(1.0),
            stepped(gradient),
        ]
        for rank in range(ranks)
    ]
    return collect_trace(events)


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
