import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from paceline.launch import signals
from paceline.launch.processes import WorkerSupervisor
from paceline.launch.restart_policy import STOP_S
from paceline.launch.signals import (
    CommandInterrupt,
    InterruptedStartError,
    Interrupts,
    signals_raised,
    stop_requests,
)
from tests.launch.waiting import alive, patient, until
from tests.support.tiers import slow

pytestmark = pytest.mark.ranks
_HERE = Path(__file__).parent
_LIMIT_S = 60.0  # only a hang takes that long


@dataclass
class Launcher:
    """A launcher in a process group of its own, as a shell would start it."""

    process: subprocess.Popen[str]
    directory: Path

    def wait_for_workers(self) -> set[int]:
        """Wait until both workers run; give the ids of all processes, the launcher's included."""
        until(lambda: len(list(self.directory.glob("ready-*"))) == 2)
        family = psutil.Process(self.process.pid).children(recursive=True)
        named = [json.loads(path.read_text()) for path in self.directory.glob("ready-*")]
        assert {pid for pids in named for pid in pids} <= {member.pid for member in family}
        return {member.pid for member in family} | {self.process.pid}

    def finish(self) -> dict[str, object]:
        _, errors = self.process.communicate(timeout=patient(_LIMIT_S))
        assert self.process.returncode == 0, errors
        assert errors == ""
        outcome = json.loads((self.directory / "outcome.json").read_text())
        assert isinstance(outcome, dict)
        return outcome


class Start(Protocol):
    def __call__(self, entry: str, stop_s: float = STOP_S) -> Launcher: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[subprocess.Popen[str]] = []

    def run(entry: str, stop_s: float = STOP_S) -> Launcher:
        script, logs, outcome = _HERE / "launcher.py", tmp_path / "logs", tmp_path / "outcome.json"
        arguments = [entry, str(tmp_path), str(logs), str(outcome), str(stop_s)]
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return Launcher(process, tmp_path)

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _gone(pids: set[int]) -> None:
    until(lambda: not [pid for pid in pids if alive(pid)], limit_s=_LIMIT_S)


@pytest.mark.parametrize(
    ("number", "group"),
    [
        (signal.SIGINT, True),
        slow(signal.SIGTERM, False),
        (signal.SIGTERM, True),
        slow(signal.SIGHUP, True),
    ],
)
@pytest.mark.slow
def test_a_signal_stops_the_workers_and_leaves_no_process(
    start: Start, number: signal.Signals, group: bool
) -> None:
    launcher = start("wait_for_stop")
    pids = launcher.wait_for_workers()
    (os.killpg if group else os.kill)(launcher.process.pid, number)
    outcome = launcher.finish()
    assert outcome == {
        "results": {"0": "stopped", "1": "stopped"},
        "interrupted": True,
        "failures": [],
    }
    _gone(pids)


@pytest.mark.slow
def test_workers_that_do_not_stop_are_killed_in_time(start: Start) -> None:
    launcher = start("wait_for_kill", stop_s=0.2)
    pids = launcher.wait_for_workers()
    os.killpg(launcher.process.pid, signal.SIGINT)
    outcome = launcher.finish()
    assert outcome["interrupted"] is True
    assert outcome["results"] == {}
    assert "did not stop in time" in str(outcome["failures"])
    _gone(pids)


@pytest.mark.slow
def test_a_second_ctrl_c_kills_at_once(start: Start) -> None:
    launcher = start("wait_for_kill", stop_s=1000.0)
    pids = launcher.wait_for_workers()
    worker = next(iter(launcher.directory.glob("ready-*")))
    os.killpg(launcher.process.pid, signal.SIGINT)
    until(lambda: worker.with_suffix(".asked").exists())
    os.killpg(launcher.process.pid, signal.SIGINT)
    outcome = launcher.finish()
    assert outcome["interrupted"] is True
    assert outcome["results"] == {}
    _gone(pids)


def test_a_signal_before_the_workers_run_ends_the_launch(start: Start) -> None:
    launcher = start("wait_for_kill")
    until(lambda: (launcher.directory / "logs").exists())  # signals are caught soon after
    family = psutil.Process(launcher.process.pid)
    until(lambda: _catches(launcher.process.pid, signal.SIGTERM))
    pids = {member.pid for member in family.children(recursive=True)} | {launcher.process.pid}
    launcher.process.send_signal(signal.SIGTERM)
    outcome = launcher.finish()
    assert outcome["interrupted"] is True
    assert outcome["results"] == {}
    _gone(pids)


def _catches(pid: int, number: signal.Signals) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def test_killing_the_launcher_ends_the_workers(start: Start) -> None:
    launcher = start("wait_for_kill")
    pids = launcher.wait_for_workers()
    launcher.process.kill()
    _gone(pids)


@pytest.mark.slow
def test_killing_the_fork_server_ends_the_workers_and_the_launch(start: Start) -> None:
    launcher = start("wait_for_kill")
    pids = launcher.wait_for_workers()
    ready = json.loads((launcher.directory / "ready-0").read_text())
    server = psutil.Process(ready[0]).ppid()
    os.kill(server, signal.SIGKILL)
    outcome = launcher.finish()
    assert outcome["interrupted"] is False
    assert "ended with the fork server" in json.dumps(outcome["failures"])
    _gone(pids)


def test_signals_close_together_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []
    guard = WorkerSupervisor({}, delivered=lambda rank: False)
    monkeypatch.setattr(WorkerSupervisor, "kill", lambda _: killed.append(True))
    with Interrupts().caught() as interrupts, interrupts.starting():
        interrupts.pass_on(guard)
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.received
        assert killed == []
        monkeypatch.setattr(signals, "SAME_S", 0.0)
        os.kill(os.getpid(), signal.SIGINT)
        assert killed == [True]
    guard.close()


def test_a_signal_breaks_a_start_off() -> None:
    with (
        Interrupts().caught() as interrupts,
        pytest.raises(InterruptedStartError),
        interrupts.starting(),
    ):
        os.kill(os.getpid(), signal.SIGTERM)
    assert interrupts.received
    with pytest.raises(InterruptedStartError), interrupts.starting():
        raise AssertionError("a start after a signal")


def test_a_library_may_break_by_the_signal_that_breaks_a_start_off() -> None:
    with (
        Interrupts().caught() as interrupts,
        pytest.raises(InterruptedStartError),
        interrupts.starting(),
    ):
        _import_that_a_signal_breaks()


def _import_that_a_signal_breaks() -> None:
    try:
        os.kill(os.getpid(), signal.SIGTERM)
    except InterruptedStartError:
        raise ImportError("cannot load module more than once per process") from None


def test_an_interruption_that_an_import_has_lost_starts_no_workers() -> None:
    before = signal.signal(signal.SIGINT, CommandInterrupt())
    try:
        with signals_raised(), Interrupts().caught() as interrupts:
            assert not interrupts.received
        with suppress(KeyboardInterrupt):  # as torch does while it imports numpy
            signal.raise_signal(signal.SIGINT)
        with Interrupts().caught() as interrupts:
            assert interrupts.received
            with pytest.raises(InterruptedStartError), interrupts.starting():
                pytest.fail("nothing is started")
        with pytest.raises(KeyboardInterrupt), signals_raised():
            pytest.fail("nothing is measured")
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_error_without_a_signal_stays_what_it_is() -> None:
    with Interrupts().caught() as interrupts, pytest.raises(ImportError), interrupts.starting():
        raise ImportError("no numpy")


def test_an_ignored_hangup_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupts().caught() as interrupts:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupts.received
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_requests_to_stop_that_are_close_together_are_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with stop_requests() as stop:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert stop.count == 1
        monkeypatch.setattr(signals, "SAME_S", 0.0)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.raise_signal(number)
        assert stop.count == 4
