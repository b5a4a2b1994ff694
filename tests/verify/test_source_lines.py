"""The script's lines: who called, what a loss was assigned in, and which a finding names."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.verify.compare import given_limits
from paceline.verify.events import Backward, Clipped, Combined, Event, Met, Placed, Scaled, Stepped
from paceline.verify.source_lines import assigned, caller, code_at
from paceline.verify.tensor_sketch import mark
from paceline.verify.trace import Trace
from paceline.verify.verdict import evaluate_launch
from tests.verify.made import begun, stepped, tensor_of, trace_of, trained


def test_the_innermost_line_of_the_users_own_code() -> None:
    here = caller()
    assert code_at(here) == "here = caller()"
    assert Path(here.rpartition(":")[0]) == Path(__file__)


class _Part:
    def place(self, outside: set[int]) -> str:
        return caller(outside)


def test_methods_of_some_objects_are_not_meant() -> None:
    part = _Part()
    assert code_at(part.place(set())) == "return caller(outside)"
    other = part.place({id(part)})
    assert code_at(other) == "other = part.place({id(part)})"


LOOP = """
divisor = 4
loss = 0
def train(scaler):
    for inputs in loader:
        scores = model(inputs)
        loss = criterion(scores)
        loss /= divisor
        {}
"""


@pytest.mark.parametrize(
    ("statement", "lines"),
    [
        ("loss.backward()", [8, 7]),
        ("scaler.scale(loss).backward()", [8, 7]),
        ("(loss * 2).backward()", [8, 7]),
        ("criterion(scores).backward()", [6]),
        ("total.backward()", []),
    ],
)
def test_where_a_loss_is_assigned(statement: str, lines: list[int], tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(LOOP.format(statement))
    assert assigned(f"{script}:9") == [f"{script}:{line}" for line in lines]


def test_a_script_that_is_gone_has_no_lines() -> None:
    assert assigned("/nowhere/train.py:3") == []
    assert code_at("/nowhere/train.py:3") == ""


def started(events: Iterable[Event], weight: float) -> list[Event]:
    """Have the step begin with some weight."""
    before = (mark(tensor_of(weight), whole=True),)
    return [replace(e, before=before) if isinstance(e, Stepped) else e for e in events]


def launch(*ranks: list[Event]) -> Trace:
    return trace_of([[begun(0, 0), *events] for events in ranks])


def found(first: Trace, other: Trace) -> list[tuple[str, tuple[str, ...]]]:
    findings = evaluate_launch(first, other, given_limits(1e-4)).findings
    return [(str(f.cause), f.lines) for f in findings]


ALONE = launch(trained(["1", "2"], 1.0, 1.0))


def test_means_over_unequal_numbers_of_items() -> None:
    place = Placed("backward", "/gone/train.py:7")
    ranks = [
        [place, *trained(["1"], 0.8, 0.9, 1.1)],
        [place, *trained(["2"], 1.6, 0.9, 1.1)],
    ]
    # 1.0 lies between the ranks' losses, whose mean is 1.2.
    assert found(ALONE, launch(*ranks)) == [("weighed-alike", ("/gone/train.py:7",))]
    # Another start explains other losses already.
    other = launch(*(started(rank, 2.0) for rank in ranks))
    first = launch(started(trained(["1", "2"], 1.0, 1.0), 1.0))
    assert [cause for cause, _ in found(first, other)] == ["other-start"]
    ranks[1][2] = Backward(1.2)
    assert [cause for cause, _ in found(ALONE, launch(*ranks))] == ["unknown"]
    # A mean over all samples is never above those of all shares.
    ranks[1][2] = Backward(0.9)
    assert found(ALONE, launch(*ranks)) == [("across-samples", ("/gone/train.py:7",))]


@pytest.mark.parametrize("after", [Backward(0.0, adds=True), Combined()])
def test_gradients_clipped_before_all_of_them_are_there(after: Event) -> None:
    step = trained(["1"], 1.0, 0.9, 1.1)
    step[-1:] = [Clipped(), Placed("clip", "a.py:1"), after, step[-1]]
    other = launch(step, trained(["2"], 1.0, 0.9, 1.1))
    assert ("clipped-early", ("a.py:1",)) in found(ALONE, other)
    skipped: list[Event] = [Clipped(), Scaled(2.0, skipped=True), after]
    other = launch([*trained(["1"], 1.0, 0.9, 1.1), *skipped], trained(["2"], 1.0, 0.9, 1.1))
    assert "clipped-early" not in dict(found(ALONE, other))
    step[-2:] = [step[-1], after]
    other = launch(step, trained(["2"], 1.0, 0.9, 1.1))
    assert "clipped-early" not in dict(found(ALONE, other))


@pytest.mark.parametrize(
    ("cause", "more"),
    [
        ("weights-apart", Placed("step", "a.py:1")),
        ("wrapper-bypassed", Placed("bypass", "a.py:1")),
        ("late-parameter", Placed("late", "a.py:1")),
        ("scale-apart", Scaled(2.0)),
        ("no-sync", Backward(1.0, synced=False)),
    ],
)
def test_why_ranks_come_to_other_weights(cause: str, more: Event) -> None:
    drawn, backward, _ = trained(["1"], 1.0, 0.9)
    one: list[Event] = [Met(False), drawn, backward, more, stepped(0.9, 1.1)]
    two: list[Event] = [*trained(["2"], 1.0, 0.8, 1.2)]
    two.insert(2, Scaled(4.0) if cause == "scale-apart" else Placed("x", "a.py:2"))
    causes = [name for name, _ in found(ALONE, launch(one, two))]
    assert causes == [cause]
