"""Ends processes for good: workers that outlive their time, and whatever else a launch leaves."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import final

import psutil

from paceline.launch.heartbeat import Reading
from paceline.launch.restart_policy import StopGrace, stopping_line
from paceline.launch.watchdog.worker_state import ProcessState


def manager_directories(process: psutil.Process) -> list[Path]:
    """Name the temporary directory of torch's process that frees shared memory, if this is one."""
    try:
        if not process.name().startswith("torch_shm_manag"):  # the kernel keeps 15 letters
            return []
        sockets = [Path(str(c.laddr)) for c in process.net_connections("unix") if c.laddr]
    except psutil.Error:
        return []
    return sorted({s.parent for s in sockets if s.parent.name.startswith("torch-shm-dir-")})


def remove_directories(directories: list[Path]) -> None:
    """Remove the directories of such processes that were killed."""
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


PEERS_S = 3.0
"""From the first worker's failure until its peers are killed; they may hang in a collective."""
EXIT_S = 15.0
"""Once all have delivered results and one has exited: until the slowest is killed."""
_REAP_S = 2.0
_NEVER_S = float("inf")
_TRACED = {"t", "tracing-stop", psutil.STATUS_TRACING_STOP}


@dataclass(frozen=True)
class Worker:
    """A worker process as its supervisor needs it."""

    pid: int
    sentinel: int
    """Descriptor that becomes readable when the process ends."""


@final
class WorkerSupervisor:
    """A thread that ends workers which don't end by themselves.

    It stands beside the elastic agent, whose own time-out in this place is 30 s and can't be set:
    once a worker has ended without a result, the others get PEERS_S; once a stop was requested
    they all get SIGTERM and the time that they need, within limits. After that: SIGKILL. One
    object, since its thread waits for ends, requests and deadlines in a single place.
    """

    def __init__(
        self,
        workers: Mapping[int, Worker],
        delivered: Callable[[int], bool],
        read: Callable[[], Iterable[Reading]] = tuple,
        print_line: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Start watching.

        Args:
            workers: By rank.
            delivered: Whether the worker of this rank delivered its result.
            print_line: Tells the user what a stop waits for, on the thread.
        """
        self._processes = {rank: find_process(worker.pid) for rank, worker in workers.items()}
        self._sentinels = {worker.sentinel: rank for rank, worker in workers.items()}
        self._delivered = delivered
        self._read = read
        self._print_line = print_line
        self._deadline_s = self._stop_by_s = _NEVER_S
        self._stop_request: tuple[float, StopGrace] | None = None
        self._exit_by_s = _NEVER_S
        self._stop_sent = False
        self._kill_now = False
        self._closing = False
        self._killed: set[int] = set()
        # Self-pipe that wakes the thread. Non-blocking: a signal handler must not wait for room.
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        self._thread = threading.Thread(target=self._watch, name="paceline-supervisor", daemon=True)
        self._thread.start()

    @property
    def killed(self) -> frozenset[int]:
        """Ranks that had to be killed."""
        return frozenset(self._killed)

    def request_stop(self, since_s: float, grace: StopGrace) -> None:
        """Ask the workers to stop. Takes no lock: a signal handler may call it.

        Args:
            since_s: When the user asked, by `time.monotonic`.
            grace: How much later those that have not ended are killed.
        """
        self._stop_request = since_s, grace
        self._wake()

    def limit_exit(self) -> None:
        """Give the workers, which all have delivered results, EXIT_S from the first call on."""
        if self._exit_by_s == _NEVER_S:
            self._exit_by_s = time.monotonic() + EXIT_S
            self._wake()

    def kill(self) -> None:
        """Kill the workers now. Takes no lock: a signal handler may call it."""
        self._kill_now = True
        self._wake()

    def close(self) -> None:
        """Stop watching."""
        self._closing = True
        self._wake()
        self._thread.join()
        os.close(self._wake_r)
        os.close(self._wake_w)

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake_w, b"!")

    def _watch(self) -> None:
        while not self._closing:
            # Wait for a worker's end, a request through the pipe, or the deadline.
            due_s = min(self._deadline_s, self._stop_by_s)
            timeout_s = None if due_s == _NEVER_S else max(0.0, due_s - time.monotonic())
            ready = connection.wait([self._wake_r, *self._sentinels], timeout_s)
            if self._wake_r in ready:
                os.read(self._wake_r, 64)
            # A worker that has ended is waited for no more, and may shorten the others' time.
            ended = [self._sentinels.pop(s) for s in list(self._sentinels) if s in ready]
            self._set_deadline(ended)
            self._follow_stop()
            if time.monotonic() >= min(self._deadline_s, self._stop_by_s):
                self._kill_all()

    def _set_deadline(self, ended: Sequence[int]) -> None:
        # Each reason can only bring the deadline forward: a failed peer,
        if not all(self._delivered(rank) for rank in ended):
            self._deadline_s = min(self._deadline_s, time.monotonic() + PEERS_S)
        # results that are all delivered,
        self._deadline_s = min(self._deadline_s, self._exit_by_s)
        # or an order to kill.
        if self._kill_now:
            self._deadline_s = time.monotonic()
            self._kill_now = False

    def _follow_stop(self) -> None:
        """Pass a request to stop on once, and give those that write a snapshot more time."""
        if self._stop_request is None or not self._sentinels:
            return
        since_s, grace = self._stop_request
        if not self._stop_sent:
            self._stop_sent, self._stop_by_s = True, since_s
            for process in self._processes.values():
                _end(process, psutil.Process.terminate)
            self._allow(since_s, grace)
        if time.monotonic() >= self._stop_by_s:
            self._allow(since_s, grace, is_late=True)

    def _allow(self, since_s: float, grace: StopGrace, *, is_late: bool = False) -> None:
        """Settle when those that were asked to stop are killed, and tell the user where it moves.

        Where no step has begun, nothing is saved, and the end takes no time.
        """
        readings = list(self._read())
        before_s = self._stop_by_s
        self._stop_by_s = max(before_s, since_s + grace.for_workers(readings, is_late=is_late))
        left_s = self._stop_by_s - time.monotonic()
        begun = any(reading.step is not None for reading in readings)
        if begun and left_s > 0 and self._stop_by_s > before_s:
            self._print_line(stopping_line(left_s, is_late=is_late))

    def _kill_all(self) -> None:
        for rank, process in self._processes.items():
            if _end(process, psutil.Process.kill):
                self._killed.add(rank)
        # Done: nothing is left to wait for but `close`.
        self._deadline_s = self._exit_by_s = self._stop_by_s = _NEVER_S
        self._sentinels = {}


def reap(spared: set[int], server: int = 0) -> None:
    """Kill all descendants of this process, orphans it adopted included, and wait for their end.

    Args:
        spared: Process ids to leave alone, with all that they have started: what was there before,
            the fork server and its helper.
        server: The fork server's, which has started the workers: these are not left alone.
    """
    descendants = psutil.Process().children(recursive=True)
    spared = spared | _started_by(spared - {server})
    doomed = [process for process in descendants if process.pid not in spared]
    # Looked up first: of a process that is gone nobody can say which directory it had.
    directories = [path for process in doomed for path in manager_directories(process)]
    for process in doomed:
        _end(process, psutil.Process.kill)
    psutil.wait_procs(doomed, timeout=_REAP_S)
    remove_directories(directories)


def _started_by(parents: set[int]) -> set[int]:
    """List the descendants of these processes."""
    pids = set()
    for pid in parents:
        with suppress(psutil.NoSuchProcess):
            pids |= {process.pid for process in psutil.Process(pid).children(recursive=True)}
    return pids


def find_process(pid: int) -> psutil.Process | None:
    """Find a process; it remembers its start time, so that a reused id is never signalled."""
    try:
        return psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def process_state(process: psutil.Process | None) -> ProcessState:
    """See how a process is: one that has ended and that nobody has waited for is gone."""
    try:
        if process is None or not process.is_running():
            return "gone"
        status = process.status()
    except psutil.NoSuchProcess:
        return "gone"
    except psutil.AccessDenied:
        return "running"
    if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
        return "gone"
    if status in _TRACED:
        return "traced"
    return "stopped" if status == psutil.STATUS_STOPPED else "running"


def descendants() -> set[int]:
    """List the process ids of all descendants of this process."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def _end(process: psutil.Process | None, how: Callable[[psutil.Process], None]) -> bool:
    """Signal a process unless it is gone; tell whether it was there."""
    try:
        if process is None or not process.is_running():
            return False
        how(process)
    except psutil.NoSuchProcess:
        return False
    return True
