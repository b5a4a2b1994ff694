"""Dumps the Python stacks of workers: on SIGUSR1 they write them into their logs.

The signal is handled in C (faulthandler), so it works while a thread holds the GIL.
"""

import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from paceline.launch.errors.python_stacks import THREAD
from paceline.launch.watchdog.worker_state import WorkerState
from paceline.results.run_directory import log_path

_ANSWER_S = 3.0
"""A worker that hasn't answered by then doesn't."""
_SETTLED_S = 0.3
_POLL_S = 0.02
_MAX_BYTES = 1 << 18


@final
@dataclass
class _Request:
    log: Path
    start: int
    """Size of the log when the signal was sent."""
    size: int
    since_s: float
    """Since when the log has had this size."""


def collect_stacks(states: Sequence[WorkerState], log_dir: Path) -> dict[int, str]:
    """Ask this host's workers for their stacks. Blocks for up to 3 s.

    Args:
        states: The workers; those that are stopped or gone are left out: they can't answer.
        log_dir: Where their logs are, into which faulthandler writes on SIGUSR1.

    Returns:
        The stacks of all of a worker's threads, by rank; nothing for those that didn't answer.
    """
    requests = {}
    for state in states:
        if state.process == "running":
            log = log_path(log_dir, state.rank)
            with suppress(OSError):
                # The answer is what the log gains after the signal.
                size = log.stat().st_size
                os.kill(state.pid, signal.SIGUSR1)
                requests[state.rank] = _Request(log, size, size, time.monotonic())
    end_s = time.monotonic() + _ANSWER_S
    # faulthandler's end can't be seen: an answer is complete once the log stops growing.
    while not all(map(_has_answered, requests.values())) and time.monotonic() < end_s:
        time.sleep(_POLL_S)
    answers = {rank: _answer(request) for rank, request in requests.items()}
    return {rank: text for rank, text in answers.items() if text}


def _has_answered(request: _Request) -> bool:
    with suppress(OSError):
        size = request.log.stat().st_size
        if size != request.size:
            request.size, request.since_s = size, time.monotonic()
    return request.size > request.start and time.monotonic() - request.since_s >= _SETTLED_S


def _answer(request: _Request) -> str:
    try:
        with request.log.open("rb") as file:
            file.seek(request.start)
            text = file.read(_MAX_BYTES).decode(errors="replace")
    except OSError:
        return ""
    match = THREAD.search(text)
    return text[match.start() :].strip("\n") if match else ""
