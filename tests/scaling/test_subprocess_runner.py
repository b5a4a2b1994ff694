"""Commands of a study: real ones, that need no torch."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline._version import __version__
from paceline.errors import ExitCode
from paceline.launch.signals import signals_raised
from paceline.scaling.subprocess_runner import (
    PROGRAM,
    InterruptedStudyError,
    problem_in,
    run_command,
)


def nothing() -> bool:
    """Do nothing meanwhile."""
    return False


def python(text: str) -> list[str]:
    """A small program instead of a training."""
    return [sys.executable, "-S", "-c", text]


FOREVER = python("import signal\nsignal.pause()")
IN_ORDER = python("""
import signal, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit(75))
print("ready", flush=True)
signal.pause()
""")


def test_a_command_that_ends_well(tmp_path: Path) -> None:
    ended = run_command([*PROGRAM, "--version"], tmp_path / "log", 60.0, nothing)
    assert (ended.exit_code, ended.problem) == (0, None)
    assert (tmp_path / "log").read_text().strip() == __version__
    assert ended.wall_s > 0


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    words = [*PROGRAM, "train", "nothing-like-it"]
    ended = run_command(words, tmp_path / "log", 60.0, nothing)
    assert ended.exit_code == ExitCode.USAGE
    assert (ended.problem or "").startswith("unknown recipe 'nothing-like-it'")


@pytest.fixture
def _none_left() -> Iterator[None]:
    """See that no process is left but those that tests share."""
    before = psutil.Process().children()
    yield
    assert set(psutil.Process().children()) <= set(before)


@pytest.mark.usefixtures("_none_left")
def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    ended = run_command(FOREVER, tmp_path / "log", 0.0, nothing)
    assert ended.exit_code == ExitCode.INFRASTRUCTURE
    assert "and was ended" in (ended.problem or "")


@pytest.mark.usefixtures("_none_left")
def test_a_command_that_has_run_for_long_enough_is_stopped_in_order(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ended = run_command(IN_ORDER, log, 60.0, lambda: bool(log.read_text()))
    assert (ended.exit_code, ended.problem) == (0, None)


@pytest.mark.usefixtures("_none_left")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_command_and_is_told(number: signal.Signals, tmp_path: Path) -> None:
    def interrupt() -> bool:
        os.kill(os.getpid(), number)
        return False

    before = signal.getsignal(number)
    with pytest.raises(InterruptedStudyError), signals_raised():
        run_command(FOREVER, tmp_path / "log", 60.0, interrupt)
    assert signal.getsignal(number) is before


@pytest.mark.usefixtures("_none_left")
def test_a_signal_in_the_middle_of_a_fork_isnt_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What hooks of a fork raise is ignored."""
    popen = subprocess.Popen

    def forking(*words: Any, **named: Any) -> subprocess.Popen[bytes]:
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        return popen(*words, **named)

    monkeypatch.setattr(subprocess, "Popen", forking)
    with pytest.raises(InterruptedStudyError), signals_raised():
        run_command(FOREVER, tmp_path / "log", 60.0, nothing)


def test_a_signal_that_is_ignored_stays_so() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with signals_raised():
            os.kill(os.getpid(), signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


_TRACEBACK = """Paceline: training
paceline: The training failed on rank 0 (node0, step 3, in forward).

Traceback (most recent call last):
  File "model.py", line 3, in forward
    x: int = big()
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB

Other workers:
  rank 1 (node0): ConnectionError: lost

Log of this worker: runs/x/logs/rank-0.log
"""


@pytest.mark.parametrize(
    ("log", "problem"),
    [
        (_TRACEBACK, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB"),
        ("paceline: nowhere: no answer. Is it up?\n", "nowhere: no answer. Is it up?"),
        ("one\nTraceback\nlast line\n", "last line"),
        ("", "it ended with exit code 65 without a word"),
        ("paceline: " + 1000 * "x", 396 * "x" + " ..."),
    ],
)
def test_the_cause_in_what_was_printed(log: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(log)
    assert problem_in(tmp_path / "log", 65) == problem
