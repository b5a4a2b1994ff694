"""Events of all ranks become steps, passes and evaluations."""

import pytest

from paceline.verify.events import Backward, Drawn, Event, Figured, Handed, PassEnded, Printed
from paceline.verify.trace import tell
from tests.verify.made import begun, stepped, trained


def rank_of(samples: list[str], loss: float) -> list[Event]:
    judged: list[Event] = [
        begun(1, 0),
        Drawn(1, 0, ("7",), ()),
        Drawn(1, 0, ("8",), ()),
        PassEnded(1, 0, False),
    ]
    steps: list[Event] = [e for s in samples for e in trained([s], loss, 1.0)]
    return [begun(0, 0), *steps, PassEnded(0, 0, False), *judged, begun(0, 1)]


def test_loaders_without_a_backward_pass_are_evaluations() -> None:
    story = tell([rank_of(["1", "2"], 1.0), rank_of(["3", "4"], 3.0)])
    assert [p.samples for p in story.training()] == [(("1", "2"), ("3", "4"))]
    assert [p.samples for p in story.evaluations()] == [(("7", "8"), ("7", "8"))]
    assert [step.all_samples for step in story.steps] == [["1", "3"], ["2", "4"]]
    assert story.training()[0].batches == (2, 2)
    assert story.training()[0].is_whole
    assert not story.in_session


def test_a_pass_that_one_rank_left_is_not_whole() -> None:
    cut = rank_of(["3"], 1.0)
    cut[cut.index(PassEnded(0, 0, False))] = PassEnded(0, 0, True)
    story = tell([rank_of(["1"], 1.0), cut])
    assert not story.training()[0].is_whole


def test_losses_are_weighted_by_samples() -> None:
    one: list[Event] = [Drawn(0, 0, ("1", "2", "3"), ()), Backward(1.0), stepped(1.0)]
    two: list[Event] = [Drawn(0, 0, ("4",), ()), Backward(5.0), stepped(1.0)]
    (step,) = tell([one, two]).steps
    assert step.loss(by_samples=True) == pytest.approx((3 * 1 + 5) / 4)
    assert step.loss(by_samples=False) == pytest.approx(3.0)


def test_a_sessions_pieces_are_one_step() -> None:
    pieces: list[Event] = [
        Handed({}, {}, "session"),
        Drawn(-1, 0, ("1", "2"), (), True, 3),
        Backward(1.0, 2 / 3),
        Drawn(-1, 0, ("3",), (), True, 3),
        Backward(4.0, 1 / 3),
        stepped(1.0),
        PassEnded(-1, 0, False),
        Figured({"loss": 2.0}, 9),
        Printed("line"),
    ]
    story = tell([pieces])
    (step,) = story.steps
    assert step.samples == (("1", "2", "3"),)
    assert step.loss(by_samples=False) == pytest.approx(2.0)
    assert story.in_session
    assert story.printed == ("line",)
    assert story.training()[0].is_whole
