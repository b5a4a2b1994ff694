"""Which batch a step is trained on, by the order in which batches and steps come."""

import pytest

from paceline.verify.events import Backward, Drawn, Event, PassBegun, PassEnded, Stepped
from paceline.verify.prefetch_tracking import trained_in_order
from tests.verify.made import stepped

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
            made.append(Backward(1.0))
        elif letter == "S":
            made.append(stepped(1.0))
        else:
            made.append(Drawn(0, number, (letter,), ()))
    return made


def steps(told: list[Event]) -> list[str]:
    """Give each step's batches."""
    found, waiting = [], ""
    for event in told:
        if isinstance(event, Drawn):
            waiting += event.samples[0]
        elif isinstance(event, Stepped):
            found.append(waiting)
            waiting = ""
    return found


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
    assert steps(trained_in_order(events(words))) == expected


def test_a_whole_pass_of_one_batch_is_no_look() -> None:
    told = trained_in_order(events("(0)(1", batches=1))
    assert [e.samples for e in told if isinstance(e, Drawn)] == [("0",), ("1",)]
