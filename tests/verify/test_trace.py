"""Events of all ranks become steps, passes and evaluations."""

import pytest

from paceline.verify.events import (
    Backward,
    Drawn,
    Event,
    Figured,
    ModelBuilt,
    PassBegun,
    PassEnded,
    Printed,
    Stepped,
)
from paceline.verify.trace import Trace
from tests.verify.made import begun, stepped, trace_of, trained


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
    trace = trace_of([rank_of(["1", "2"], 1.0), rank_of(["3", "4"], 3.0)])
    assert [p.samples for p in trace.training()] == [(("1", "2"), ("3", "4"))]
    assert [p.samples for p in trace.evaluations()] == [(("7", "8"), ("7", "8"))]
    assert [step.all_samples for step in trace.steps] == [["1", "3"], ["2", "4"]]
    assert trace.training()[0].batches == (2, 2)
    assert trace.training()[0].is_whole
    assert not trace.in_session


def test_a_pass_that_one_rank_left_is_not_whole() -> None:
    cut = rank_of(["3"], 1.0)
    cut[cut.index(PassEnded(0, 0, False))] = PassEnded(0, 0, True)
    trace = trace_of([rank_of(["1"], 1.0), cut])
    assert not trace.training()[0].is_whole


def test_losses_are_weighted_by_samples() -> None:
    one: list[Event] = [Drawn(0, 0, ("1", "2", "3"), ()), Backward(1.0), stepped(1.0)]
    two: list[Event] = [Drawn(0, 0, ("4",), ()), Backward(5.0), stepped(1.0)]
    (step,) = trace_of([one, two]).steps
    assert step.loss(by_samples=True) == pytest.approx((3 * 1 + 5) / 4)
    assert step.loss(by_samples=False) == pytest.approx(3.0)


def test_a_sessions_pieces_are_one_step() -> None:
    pieces: list[Event] = [
        ModelBuilt("session"),
        Drawn(-1, 0, ("1", "2"), (), True),
        Backward(1.0, 2 / 3),
        Drawn(-1, 0, ("3",), (), True),
        Backward(4.0, 1 / 3),
        stepped(1.0),
        PassEnded(-1, 0, False),
        Figured({"loss": 2.0}, 9),
        Printed("line"),
    ]
    trace = trace_of([pieces])
    (step,) = trace.steps
    assert step.samples == (("1", "2", "3"),)
    assert step.loss(by_samples=False) == pytest.approx(2.0)
    assert trace.in_session
    assert trace.by_rank_0(Printed) == (Printed("line"),)
    assert trace.training()[0].is_whole


LENGTH = 4


def events(words: str, *, batches: int = LENGTH) -> list[Event]:
    """Make events: `(` begins a pass, a digit takes a batch, `B` and `S` make a step, `)` ends."""
    made: list[Event] = []
    number = -1
    for letter in words:
        if letter == "(":
            number += 1
            made.append(PassBegun(0, number, "RandomSampler", 1, True, False, False, 0, 8, batches))
        elif letter == ")":
            made.append(PassEnded(0, number, False))
        elif letter == "B":
            made.append(Backward(1.0, adds=_has_gradients(made)))
        elif letter == "S":
            made.append(stepped(1.0))
        else:
            made.append(Drawn(0, number, (letter,), ()))
    return made


def _has_gradients(told: list[Event]) -> bool:
    """Tell whether a backward pass came since the last step."""
    last = next((e for e in reversed(told) if isinstance(e, Backward | Stepped)), None)
    return isinstance(last, Backward)


def steps(trace: Trace) -> list[str]:
    """Give each step's batches."""
    return ["".join(step.samples[0]) for step in trace.steps]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("(0BS1BS2BS3BS)", ["0", "1", "2", "3"]),
        ("(01BS2BS3BS)BS", ["0", "1", "2", "3"]),  # Accelerate: the end is met before the last
        ("(01BS2BS3BSBS", ["0", "1", "2", "3"]),  # Lightning: the end isn't met
        ("(01BS2BS3BSBS(45BS6BS7BSBS", list("01234567")),
        ("(01BS)BS", ["0", "1"]),
        ("(01BS2BS3BS(45BS6BS7BS", list("012456")),  # leaves with a batch in hand
        ("(01BS23BS)", ["01", "23"]),  # two batches make a step
        ("(01BS2BS)", ["01", "2"]),  # likewise, and one is left over
        ("(0B1BS2B3BS)", ["01", "23"]),  # gradient accumulation
        ("(0(1BS2BS3BS4BS)", ["1", "2", "3", "4"]),  # a look
        ("(0BS(1BS(2BS", ["0", "1", "2"]),  # a pass for every step
        ("(0BSBSBS", ["0", "", ""]),  # one batch, again and again
    ],
)
def test_steps_have_their_own_batches(words: str, expected: list[str]) -> None:
    assert steps(trace_of([events(words)])) == expected


def test_a_whole_pass_of_one_batch_is_no_look() -> None:
    trace = trace_of([events("(0)(1", batches=1)])
    assert [found.samples for found in trace.evaluations()] == [(("0",),), (("1",),)]


def test_a_skipped_batch_is_not_one_fetched_early() -> None:
    """Where a resumed script goes on, in the midst of an epoch that is then seen to its end."""
    assert steps(trace_of([events("(01BS2BS3BS)")])) == ["1", "2", "3"]


@pytest.mark.parametrize(("adds", "expected"), [(True, ["01", "23"]), (False, ["01", "3"])])
def test_gradients_that_were_zeroed_count_for_nothing(adds: bool, expected: list[str]) -> None:
    told = events("(0B1BS2B)(3BS)")
    backwards = [n for n, event in enumerate(told) if isinstance(event, Backward)]
    told[backwards[-1]] = Backward(1.0, adds=adds)
    assert steps(trace_of([told])) == expected
