"""Watches the workers of one host: reads their notes, and asks the system about their processes."""

import socket
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import final

import psutil

from paceline.launch.heartbeat import COMPILING, Reading, read_note
from paceline.launch.processes import find_process, process_state
from paceline.launch.watchdog.worker_state import WorkerState

POLL_EVERY_S = 1.0
_LONGEST_POLL_S = 5 * POLL_EVERY_S
"""A longer pause between two polls is one of the watcher itself (Ctrl-Z, a suspended machine), and
counts as no more than this."""
_REMEMBERED = 60
"""Polls over which the usual step is taken."""


@final
@dataclass(kw_only=True)
class _Watched:
    """A worker, and what was seen of it."""

    path: Path
    process: psutil.Process | None
    reading: Reading = field(default_factory=Reading)
    step_age_s: float = 0.0
    age_s: float = 0.0
    paces: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    """Seconds a step, one for each poll that saw another step than the one before."""
    cpu_s: float = 0.0
    busy: float = 0.0


@final
class WorkerPoller:
    """Sees the workers of this host. `poll` about every second, from one thread."""

    def __init__(self, notes: Mapping[int, Path], pids: Mapping[int, int]) -> None:
        """Create the worker poller.

        Args:
            notes: Where each worker's note can be read, by rank.
            pids: The workers' process ids, by rank.
        """
        self.pids = dict(pids)
        self._host = socket.gethostname()
        self._workers = {
            rank: _Watched(path=path, process=find_process(pids[rank]))
            for rank, path in notes.items()
        }
        self._polled_s: float | None = None

    def poll(self) -> list[WorkerState]:
        """Read the workers' states, in rank order."""
        now_s = time.monotonic()
        before_s = now_s if self._polled_s is None else self._polled_s
        self._polled_s = now_s
        elapsed_s = min(now_s - before_s, _LONGEST_POLL_S)
        return [self._see(rank, elapsed_s) for rank in sorted(self._workers)]

    def _see(self, rank: int, elapsed_s: float) -> WorkerState:
        worker = self._workers[rank]
        _follow(worker, read_note(worker.path), elapsed_s)
        _update_cpu_time(worker, elapsed_s)
        return WorkerState(
            rank=rank,
            host=self._host,
            pid=self.pids[rank],
            process=process_state(worker.process),
            busy=worker.busy,
            reading=worker.reading,
            step_age_s=worker.step_age_s,
            age_s=worker.age_s,
            median_step_s=median(worker.paces) if worker.paces else None,
        )


def _follow(worker: _Watched, reading: Reading, elapsed_s: float) -> None:
    """Update what is known of a worker from its heartbeat."""
    before, worker.reading = worker.reading, reading
    worker.age_s = 0.0 if reading != before else worker.age_s + elapsed_s
    since_s, worker.step_age_s = worker.step_age_s + elapsed_s, 0.0
    if COMPILING in (reading.operation, before.operation):
        return  # that isn't counted to a step: none has taken so long before
    # A step of several (polls are slower than short steps) gives their mean as one pace.
    if reading.step == before.step:
        worker.step_age_s = since_s
    elif reading.step is not None and before.step is not None and reading.step > before.step:
        worker.paces.append(since_s / (reading.step - before.step))


def _update_cpu_time(worker: _Watched, elapsed_s: float) -> None:
    if worker.process is None or elapsed_s <= 0:
        return
    try:
        used = worker.process.cpu_times()
    except psutil.Error:
        return
    cpu_s = used.user + used.system
    worker.busy = max(0.0, cpu_s - worker.cpu_s) / elapsed_s if worker.cpu_s else 0.0
    worker.cpu_s = cpu_s
