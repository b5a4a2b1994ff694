"""Runs the trainings of a study as commands of their own, and waits for them."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import ExitCode
from paceline.launch.process_tree import start_apart
from paceline.launch.signals import StopRequests, stop_requests

PROGRAM = (sys.executable, "-m", "paceline")
_POLL_S = 0.1
_STOP_S = 60.0
"""Beyond what workers have to stop: they may be on other hosts."""
_KILL_S = 5.0
_PREFIX = "paceline: "
_WITH_TRACEBACK = "The training failed on "
_ERROR = re.compile(r"(?!Log of |Other )[A-Za-z_][\w.]*: ")
"""The last line of a traceback; its other lines are indented."""
_LONGEST = 400


@dataclass(frozen=True, kw_only=True)
class CommandResult:
    """How a command ended."""

    exit_code: int
    wall_s: float
    problem: str | None
    """In a line; None where it did what it should."""


class InterruptedStudyError(BaseException):
    """A signal came; the training that was under way has been stopped."""


def run_command(
    command: Sequence[str], log: Path, most_s: float | None, poll: Callable[[], bool]
) -> CommandResult:
    """Run a command to its end. Blocks; for the main thread alone.

    Args:
        command: Its words; it ends as `paceline` does.
        log: File for all that it prints.
        most_s: Seconds after which it is ended; None where it watches itself.
        poll: Called again and again meanwhile. Says whether it has run for long enough: then it is
            asked to stop in order, which is a good end as well.

    Raises:
        InterruptedStudyError: A signal came, and was passed on.
    """
    begun_s = time.monotonic()
    # Counted, not raised: in the middle of a fork an exception is lost.
    with stop_requests() as requests, log.open("w", encoding="utf-8") as out:
        process = start_apart(command, out)
        try:
            # None: too late; True: enough was measured, stop it; False: it has ended by itself.
            is_enough = _wait(process, begun_s, most_s, poll, requests)
            if is_enough or requests.count:
                _stop(process, requests)
            if requests.count:
                raise InterruptedStudyError
        finally:
            _kill(process)
    wall_s = time.monotonic() - begun_s
    code = process.returncode
    if is_enough is None:
        problem = f"it had not ended after {wall_s:.0f} s, and was ended"
        return CommandResult(exit_code=ExitCode.INFRASTRUCTURE, wall_s=wall_s, problem=problem)
    if code == 0 or (is_enough and code == ExitCode.RESUMABLE):
        return CommandResult(exit_code=0, wall_s=wall_s, problem=None)
    known = code if code in list(ExitCode) else ExitCode.INFRASTRUCTURE
    return CommandResult(exit_code=known, wall_s=wall_s, problem=problem_in(log, code))


def _wait(
    process: subprocess.Popen[bytes],
    begun_s: float,
    most_s: float | None,
    poll: Callable[[], bool],
    requests: StopRequests,
) -> bool | None:
    """Wait for the end, or until it is enough. Returns whether it is; None: it takes too long.

    Ends as well where a signal comes.
    """
    while not requests.count:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            return False
        if most_s is not None and time.monotonic() - begun_s > most_s:
            return None
        if poll():
            return True
    return False


def _stop(process: subprocess.Popen[bytes], requests: StopRequests) -> None:
    """Pass the request to stop on; another signal kills."""
    count, until_s = requests.count, time.monotonic() + _STOP_S
    process.send_signal(signal.SIGINT)
    while requests.count == count and time.monotonic() < until_s:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)
            return
    process.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_KILL_S)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of it; its workers end with it."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def problem_in(log: Path, code: int) -> str:
    """Find in what a command printed why it failed."""
    lines = [line for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    numbers = [number for number, line in enumerate(lines) if line.startswith(_PREFIX)]
    if not numbers:
        return _short(lines[-1] if lines else f"it ended with exit code {code} without a word")
    first = lines[numbers[0]].removeprefix(_PREFIX)
    errors = [line for line in lines[numbers[0] + 1 :] if _ERROR.match(line)]
    return _short(errors[0] if errors and first.startswith(_WITH_TRACEBACK) else first)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."
