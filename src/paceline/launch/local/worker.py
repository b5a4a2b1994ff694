"""What runs in a worker process before and after the entry: logs, signals, records, the result."""

import importlib
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from paceline.errors import StorageError, UsageError
from paceline.files import write_json
from paceline.launch.errors.error_records import (
    describe,
    exit_code_of,
    failure_path,
    kind_of,
    record,
    run_guarded,
)
from paceline.launch.heartbeat import note
from paceline.launch.local import logs, streams
from paceline.launch.process_tree import die_with_parent


@dataclass(frozen=True, kw_only=True)
class NodeRendezvous:
    """This node's rank, and the address of the store through which the nodes rendezvous."""

    node_rank: int
    nodes: int
    host: str
    """Of the store, as this node reaches it."""
    port: int
    ends_together: bool = False
    """Whether nodes that have done their work wait for the others, one of which keeps the store."""
    interface: str = ""
    """Network interface for the workers' sockets; empty: the user's choice, or loopback."""


@dataclass(frozen=True, kw_only=True)
class WorkerTask:
    """What a worker is given to do; the same for all workers of an attempt."""

    entry: str
    """`package.module:function`, a function (payload: str) -> str."""
    payload: str
    log_dir: Path
    scratch: Path
    """A directory of this attempt alone: results and notes."""
    attempt: int = 0
    server_pid: int = 0
    """The fork server, this worker's parent."""
    shows_each_node: bool = False
    """Whether each node's first worker prints to the terminal, rather than rank 0 alone."""
    environment: tuple[tuple[str, str], ...] = ()
    """Variables to set before the entry."""


def note_path(scratch: Path, rank: int) -> Path:
    """Name the file that shares a worker's step and operation."""
    return scratch / f"note-rank-{rank}"


def result_path(scratch: Path, rank: int) -> Path:
    """Name the file with what a worker's entry returned."""
    return scratch / f"result-rank-{rank}.json"


def work(task: WorkerTask) -> NoReturn:
    """Run one worker: called by the elastic agent in every worker process.

    The result is left as a file, so that it is there even if the process does not end well. On a
    failure the process ends at once, without clean-up: its peers then notice at once as well.

    Raises:
        SystemExit: The entry has returned. A worker that returned to torch would wait for an event,
            and multiprocessing's `Event.set` never returns if one who waited for it was killed: the
            launcher would hang with it. Without a code, since torch makes a return of code 0.
    """
    # Before anything that can fail or take time: end with the fork server, signals as workers need.
    _tie(task)
    streams.tolerate_failing_output()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with ExitStack() as stack:
        try:
            log = stack.enter_context(logs.open_log(task.log_dir, rank, world_size, task.attempt))
        except StorageError as error:
            _end(task, rank, error)
        # The first rank (of each node) prints to the terminal as well; the others to their logs.
        if rank == 0 or (task.shows_each_node and os.environ["LOCAL_RANK"] == "0"):
            logs.redirect_noise(log)
            stack.enter_context(logs.teed(log))
        else:
            logs.redirect(log)
        stack.enter_context(logs.faults_watched(log))
        # The watchdog can see this worker from here on.
        note.share(note_path(task.scratch, rank))
        try:
            result = run_guarded(_called(task.entry), task.payload, task.log_dir, rank)
        except BaseException as error:  # noqa: BLE001 - the process ends here, with a record
            logs.write_error(log, error)
            with suppress(OSError):  # the log's disk is full
                stack.close()
            _end(task, rank, error)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one that comes late must change nothing
        write_json(result_path(task.scratch, rank), result)
    raise SystemExit


def _end(task: WorkerTask, rank: int, error: BaseException) -> NoReturn:
    """End the process, with a record for the launcher also where the logs' disk takes none."""
    interrupted = isinstance(error, KeyboardInterrupt)  # the user's wish, not a failure
    if not (interrupted or failure_path(task.log_dir, rank).exists()):
        record(describe(error, rank), task.scratch)
    os._exit(exit_code_of(kind_of(error)))


def run_here(
    entry: str, payload: str, log_dir: Path, rank: int, attempt: int, *, world_size: int = 1
) -> str:
    """Run a worker in this process, which torchrun, Slurm or the user started.

    What Python code prints is copied to `rank-<n>.log`; signals and environment stay as they are.

    Args:
        entry: `package.module:function`, a function (payload: str) -> str.
        log_dir: For logs and the record of a failure.
        attempt: How often the starter restarted the workers.

    Returns:
        What the entry returned.

    Raises:
        BaseException: What the entry raised, after it was recorded.
    """
    with ExitStack() as stack:
        log = stack.enter_context(logs.open_log(log_dir, rank, world_size, attempt))
        stack.enter_context(logs.teed(log))
        stack.enter_context(logs.faults_watched(log))
        try:
            return run_guarded(_called(entry), payload, log_dir, rank)
        except BaseException as error:
            logs.write_error(log, error)
            raise


def _tie(task: WorkerTask) -> None:
    die_with_parent(task.server_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all; the launcher passes it on
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(task.environment)


def _called(entry: str) -> Callable[[str], str]:
    """Import the entry when it is called, so that a failing import is recorded like any error."""

    def call(payload: str) -> str:
        """Import and call the entry; raises what either of them raises."""
        module, _, name = entry.partition(":")
        function = getattr(importlib.import_module(module), name, None) if name else None
        if not callable(function):
            raise UsageError(f"{entry!r} names no function; expected package.module:function")
        return str(function(payload))

    return call
