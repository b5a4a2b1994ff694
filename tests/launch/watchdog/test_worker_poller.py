import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from paceline.launch.heartbeat import StepNote
from paceline.launch.watchdog.worker_poller import WorkerPoller
from paceline.launch.watchdog.worker_state import WorkerState
from paceline.options.fields import read_dataclass
from tests.launch.waiting import until


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    code = "import time\ntime.sleep(300)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        yield process
        process.kill()


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(time, "monotonic", self.read)

    def read(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_steps_and_ages(tmp_path: Path, clock: Clock) -> None:
    note, path = StepNote(), tmp_path / "note"
    note.share(path)
    watch = WorkerPoller({3: path}, {3: os.getpid()})
    (first,) = watch.poll()
    assert (first.rank, first.process) == (3, "running")
    assert (first.reading.step, first.median_step_s) == (None, None)
    for step in (10, 20, 22):
        clock.now_s += 1.0
        note.begin(step)
        (state,) = watch.poll()
        assert (state.reading.step, state.step_age_s, state.age_s) == (step, 0.0, 0.0)
    assert state.median_step_s == pytest.approx((0.1 + 0.5) / 2)
    clock.now_s += 2.0
    note.enter("gradients")
    (state,) = watch.poll()
    assert (state.step_age_s, state.age_s) == (2.0, 0.0)
    assert (state.reading.collectives, state.reading.collective) == (1, "gradients")
    assert read_dataclass(WorkerState, json.loads(json.dumps(asdict(state))), strict=True) == state


def test_compiling_is_not_counted_to_a_step(tmp_path: Path, clock: Clock) -> None:
    note, path = StepNote(), tmp_path / "note"
    note.share(path)
    watch = WorkerPoller({0: path}, {0: os.getpid()})
    ages = []
    for step, operation in ((1, "step"), (2, "step"), (2, "compile"), (2, "step"), (2, "step")):
        clock.now_s += 60.0
        note.step, note.operation = step, operation
        (state,) = watch.poll()
        ages.append((state.step_age_s, state.age_s))
    assert ages == [(0.0, 0.0)] * 4 + [(5.0, 5.0)]
    assert state.median_step_s == 5.0  # of the longest pause between two polls


def test_a_pause_of_the_watcher_itself_hardly_counts(tmp_path: Path, clock: Clock) -> None:
    note, path = StepNote(), tmp_path / "note"
    note.share(path)
    watch = WorkerPoller({0: path}, {0: os.getpid()})
    watch.poll()
    clock.now_s += 3600.0  # Ctrl-Z, or a lid that was closed
    assert watch.poll()[0].age_s == 5.0


def test_processes_that_are_stopped_or_gone(
    tmp_path: Path, sleeper: subprocess.Popen[bytes]
) -> None:
    watch = WorkerPoller({0: tmp_path / "none"}, {0: sleeper.pid})
    assert watch.poll()[0].process == "running"
    sleeper.send_signal(signal.SIGSTOP)
    until(lambda: psutil.Process(sleeper.pid).status() == psutil.STATUS_STOPPED)
    assert watch.poll()[0].process == "stopped"
    sleeper.kill()
    sleeper.wait()
    assert watch.poll()[0].process == "gone"


@pytest.mark.parametrize(
    "changed", [{"rank": "x"}, {"process": "asleep"}, {"unknown": 1}, {"reading": None}]
)
def test_what_isnt_a_state_is_refused(
    tmp_path: Path, clock: Clock, changed: Mapping[str, object]
) -> None:
    path = tmp_path / "note"
    StepNote().share(path)
    (state,) = WorkerPoller({0: path}, {0: os.getpid()}).poll()
    content = json.loads(json.dumps(asdict(state))) | changed
    with pytest.raises(ValueError, match=next(iter(changed))):
        read_dataclass(WorkerState, content, strict=True)
