import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.launch.heartbeat import Reading, StepNote, read_note
from tests.launch.waiting import patient


@pytest.mark.parametrize("first", ["share", "set"])
def test_a_note_can_be_read_by_others(tmp_path: Path, first: str) -> None:
    note, path = StepNote(), tmp_path / "note"

    def change() -> None:
        note.step, note.operation = 12, "all-reduce of gradients"

    actions: list[Callable[[], None]] = [lambda: note.share(path), change]
    for action in actions if first == "share" else reversed(actions):
        action()
    assert read_note(path) == Reading(step=12, operation="all-reduce of gradients")
    assert (note.step, note.operation) == (12, "all-reduce of gradients")
    note.step, note.operation = None, "ü" * 100
    assert read_note(path).step is None
    assert read_note(path).operation.startswith("ü" * 28)


def test_collectives_are_counted_and_times_added_up(tmp_path: Path) -> None:
    note, path = StepNote(), tmp_path / "note"
    note.share(path)
    note.begin(3)
    note.enter("gradients")
    assert read_note(path) == Reading(
        step=3, operation="step", collectives=1, collective="gradients"
    )
    note.leave()
    assert (read_note(path).collectives, read_note(path).collective) == (1, "")
    note.enter("all-gather")
    note.enter("gradients")
    assert (read_note(path).collectives, read_note(path).collective) == (3, "gradients")
    note.count(2, 1.0, 0.25, 0.5)
    note.count(3, 2.0, 0.25, 0.5)
    found = read_note(path)
    assert (found.steps, found.total_s, found.data_s, found.waiting_s) == (5, 3.0, 0.5, 1.0)
    note.snapshot_s = 4.0
    assert (read_note(path).lap_s, read_note(path).snapshot_s) == (2.0, 4.0)


def test_no_note_is_no_step(tmp_path: Path) -> None:
    assert read_note(tmp_path / "missing") == Reading()
    (tmp_path / "short").write_bytes(b"x")
    assert read_note(tmp_path / "short") == Reading()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_a_note_without_a_name_is_read_by_another_process_and_goes_with_its_own() -> None:
    code = (
        "from paceline.launch.heartbeat import StepNote\n"
        "note = StepNote(); note.step = 7\n"
        "print(note.share_unnamed(), flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        path = Path(other.stdout.readline().strip())
        assert str(os.getpid()) not in path.parts
        assert read_note(path).step == 7
        other.communicate("\n", timeout=patient(30))
    assert read_note(path) == Reading()
