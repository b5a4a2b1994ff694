"""What the launcher makes of the states and stacks that hosts report."""

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest

from paceline.launch.ssh.remote_watchdog import RemoteWatchdog
from paceline.launch.watchdog.hang_detector import HangLimits
from paceline.launch.watchdog.worker_state import WorkerState
from paceline.results.run_directory import RunDirectory
from tests.launch.watchdog.states import IN_STEP, changed

HOSTS = {"a", "b"}
BEHIND = changed(IN_STEP, rank=1, collectives=79, collective="", operation="data")


class Launcher:
    """Two hosts of one worker each; every look is two seconds after the one before."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)
        self.run = RunDirectory(directory)
        self.run.logs.mkdir(parents=True)
        self.said: list[str] = []
        self.requests = 0
        self.watchdog = RemoteWatchdog(HangLimits(), self.run, 3, self.said.append)

    def request(self) -> None:
        self.requests += 1

    def look(self, **states: WorkerState) -> list[int] | None:
        """Report states, and give the ranks that the training has failed by."""
        for host, state in states.items():
            self.watchdog.receive(host, {"states": [asdict(state)]})
        self.now_s += 2.0
        failures = self.watchdog.advance(HOSTS, self.request)
        return None if failures is None else [failure.rank for failure in failures]

    def answer(self, **stacks: Mapping[str, str]) -> None:
        for host, texts in stacks.items():
            self.watchdog.receive(host, {"stacks": texts})


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    return Launcher(tmp_path / "run", monkeypatch)


def test_a_hang_is_certain_once_all_hosts_have_answered(launcher: Launcher) -> None:
    assert launcher.look(a=IN_STEP) is None  # b hasn't reported yet
    assert launcher.requests == 0
    assert launcher.look(b=BEHIND) is None
    assert launcher.look() is None
    assert launcher.requests == 1
    launcher.answer(a={"0": "Thread 0x1 (most recent call first):\n  in a"}, b={"1": "of b"})
    assert launcher.look() == [1]
    (said,) = launcher.said
    assert "Missing is rank 1 on b (process 100)" in said
    assert "of b" in (launcher.run.logs / "hang-3.txt").read_text()


def test_a_host_that_doesnt_answer_isnt_waited_for_long(launcher: Launcher) -> None:
    assert launcher.look(a=IN_STEP, b=BEHIND) is None
    launcher.answer(a={"0": "of a"})
    looks = [launcher.look() for _ in range(4)]
    assert looks == [None, None, None, [1]]
    assert launcher.requests == 1


def test_a_training_that_has_gone_on_meanwhile_goes_on(launcher: Launcher) -> None:
    assert launcher.look(a=IN_STEP, b=BEHIND) is None
    assert launcher.look(b=changed(BEHIND, step_age_s=0.0)) is None
    launcher.answer(a={"0": "of a"}, b={"1": "of b"})
    assert launcher.look(b=BEHIND) is None  # another hang, perhaps: what was answered is of before
    assert launcher.requests == 2
    assert launcher.said == []
