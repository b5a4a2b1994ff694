import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from paceline.launch import stop_signals
from paceline.launch.stop_signals import StopRequestedError, stop_requests


def test_a_signal_ends_a_wait_and_the_next_one_counts_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop_signals, "SAME_S", 0.0)
    with stop_requests() as stop:
        stop.sleep(0.01)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)
            with pytest.raises(StopRequestedError):
                stop.sleep(60)
            with pytest.raises(StopRequestedError):
                stop.check()
            stop.again()
            stop.check()


def test_signals_close_together_are_one() -> None:
    with stop_requests() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        stop.again()
        os.kill(os.getpid(), signal.SIGTERM)
        stop.check()


def test_ignored_signals_stay_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            stop.check()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    words = [sys.executable, "-c", "import time; time.sleep(60)"]
    with stop_requests() as stop:
        assert stop.run(words, 0.05) is None
        assert stop.run([sys.executable, "-c", "raise SystemExit(3)"], 60) == 3


def test_a_signal_ends_a_commands_wait(tmp_path: Path) -> None:
    started = tmp_path / "started"
    code = (
        f"import os, time; open({str(started)!r}, 'w'); os.kill(os.getppid(), 15); time.sleep(60)"
    )
    with stop_requests() as stop, pytest.raises(StopRequestedError):
        stop.run([sys.executable, "-c", code], 60)
    assert started.exists()


def test_a_signal_that_interrupts_no_wait_ends_it() -> None:
    """As one does that comes just before the wait begins: here another thread receives it."""
    reader, writer = os.pipe()
    ended, in_time = threading.Event(), []

    def send() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        time.sleep(0.1)  # were it too short, the test would be weaker, not wrong
        os.kill(os.getpid(), signal.SIGTERM)
        in_time.append(ended.wait(30))
        os.close(writer)  # the wait ends in any case

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    thread = threading.Thread(target=send)
    try:
        with stop_requests() as stop:
            thread.start()
            with pytest.raises(StopRequestedError):
                stop.wait_for_output(reader)
            ended.set()
            thread.join()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.close(reader)
    assert in_time == [True]


def test_other_signals_end_no_wait() -> None:
    """A window that changes its size, say: its byte comes as well."""
    before = signal.signal(signal.SIGWINCH, lambda *_: None)
    try:
        with stop_requests() as stop:
            os.kill(os.getpid(), signal.SIGWINCH)
            begun_s = time.monotonic()
            stop.sleep(0.05)
            assert time.monotonic() - begun_s >= 0.05
            stop.check()
    finally:
        signal.signal(signal.SIGWINCH, before)


def test_output_wakes_it_as_well() -> None:
    with (
        stop_requests() as stop,
        subprocess.Popen([sys.executable, "-c", "print(1)"], stdout=subprocess.PIPE) as process,
    ):
        assert process.stdout is not None
        stop.wait_for_output(process.stdout.fileno())
        assert process.stdout.read() == b"1\n"
