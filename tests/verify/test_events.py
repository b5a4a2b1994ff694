"""Events come back from the disk as they were, without pickle."""

from pathlib import Path

from paceline.verify.events import (
    Drawn,
    Ended,
    Evaluated,
    Event,
    EventWriter,
    Figured,
    Reduced,
    Stepped,
    read_events,
)
from paceline.verify.tensor_sketch import TensorSketch, mark
from tests.verify.made import tensor_of

EVENTS: list[Event] = [
    Drawn(0, 1, ("3", "1"), ("aa", "bb"), True),
    Stepped(
        optimizer=0,
        names=("w", "b"),
        before=(mark(tensor_of(1.0), whole=True), TensorSketch("ab")),
        gradients=(mark(tensor_of(2.0), whole=True), None),
        weights=(),
        buffers={"center": "0f"},
        rates=(0.1, 0.2),
        scheduled=3,
    ),
    Reduced("SUM", (2.0,)),
    Figured({"loss": 0.5}, 13),
    Evaluated({}),
    Ended(False),
]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    for event in EVENTS:
        writer.write(event)
    found = read_events(writer.path)
    # NaN isn't equal to itself: a mark without a norm is compared by its hash
    assert repr(found) == repr(EVENTS)


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    writer = EventWriter(tmp_path / "rank-0.jsonl")
    for event in EVENTS[2:]:
        writer.write(event)
    text = writer.path.read_text()
    writer.path.write_text(text[:-7])
    assert read_events(writer.path) == EVENTS[2:-1]
    assert read_events(tmp_path / "nothing") == []
