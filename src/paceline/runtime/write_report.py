"""Writes a run's report once the training is over; whatever becomes of it, the training is done."""

import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from paceline.files import why_unreadable
from paceline.launch.signals import STOP_SIGNALS, stops_handled
from paceline.options.shell import command_line
from paceline.options.text import print_stderr
from paceline.results.run_directory import RunDirectory

WriteReport = Callable[[RunDirectory], object]

_TIMEOUT_S = 120.0


class CutShortError(BaseException):
    """A signal came while the report was written; named by it."""


@contextmanager
def cut_short_by_signals() -> Iterator[None]:
    """Have a signal break the block off, by CutShortError: the training is over, and its exit code
    stands. In another thread than the main one, and where they are ignored, signals do nothing new.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def cut_short(number: int, frame: FrameType | None) -> None:
        for each in STOP_SIGNALS:
            signal.signal(each, signal.SIG_IGN)  # the end is near: one is enough
        raise CutShortError(signal.Signals(number).name)

    with stops_handled(cut_short):
        yield


def write_report(run: RunDirectory) -> bool:
    """Write the report in this process; tell whether that went well."""
    try:
        with _failure_printed(run):
            from paceline.report.page import write_run_report  # takes a while

            write_run_report(run)
            return True
    except Exception:  # noqa: BLE001  # a fault of ours must not cost the training its end
        _print_failure(run, traceback.format_exc())
    return False


def write_report_apart(run: RunDirectory) -> None:
    """Write the report in a process of its own: what draws it would swell this worker's memory."""
    command = [sys.executable, "-m", "paceline", "report", str(run.path)]
    with _failure_printed(run):  # where it is cut short, subprocess.run kills the child
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
            start_new_session=True,  # Ctrl-C is for the training
        )
        if done.returncode:
            _print_failure(run, done.stderr.strip().removeprefix("paceline: "))


@contextmanager
def _failure_printed(run: RunDirectory) -> Iterator[None]:
    """Have a signal, or a failure of the system, end the block with a line that says so."""
    try:
        with cut_short_by_signals():
            yield
    except CutShortError as signalled:
        _print_failure(run, f"{signalled} came meanwhile")
    except OSError as error:
        _print_failure(run, why_unreadable(error))
    except subprocess.SubprocessError as error:
        _print_failure(run, str(error))


def _print_failure(run: RunDirectory, why: str) -> None:
    again = command_line("report", run.path)
    print_stderr(f"paceline: the report could not be written: {why}\nTry again: {again}")
