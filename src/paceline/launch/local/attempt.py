"""One attempt on this node: the workers are started once, and what became of each is collected."""

import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from json import loads
from os import environ
from pathlib import Path

from paceline.errors import InfrastructureError
from paceline.files import read_json
from paceline.launch.errors.error_records import failure_path, record
from paceline.launch.errors.failures import (
    EndedBy,
    WorkerExits,
    WorkerFailure,
    root_cause,
    silent_failure,
    unrecorded,
)
from paceline.launch.heartbeat import read_note
from paceline.launch.local import forkserver, logs
from paceline.launch.local.oom import oom_killed, oom_kills
from paceline.launch.local.worker import NodeRendezvous, WorkerTask, note_path, result_path
from paceline.launch.process_tree import SCRATCH_VARIABLE, free_shared, garbage_kept
from paceline.launch.processes import descendants, find_process, process_state, reap
from paceline.launch.signals import InterruptedStartError, Interrupts
from paceline.launch.watchdog.driver import PeriodicThread
from paceline.launch.watchdog.worker_poller import WorkerPoller
from paceline.results.run_directory import log_path

_UNKNOWN = 255
"""What Python takes for the exit code of a worker whose fork server has ended."""


@dataclass(frozen=True, kw_only=True)
class WorkerGroup:
    """What stays the same for all attempts."""

    task: WorkerTask
    workers: int
    """Of this node."""
    threads: int
    interrupts: Interrupts
    spared: frozenset[int]
    """Processes that were there before."""
    rendezvous: NodeRendezvous | None = None
    """None: this is the only node."""
    watch: Callable[[int, WorkerPoller, Callable[[], None]], PeriodicThread] | None = None
    """`driver.Watch`, with the attempt's number before; None: no watchdog."""

    @staticmethod
    def of(
        task: WorkerTask,
        workers: int,
        threads: int,
        interrupts: Interrupts,
        rendezvous: NodeRendezvous | None = None,
    ) -> "WorkerGroup":
        """Make up a group; the workers' variables are set by its threads and its rendezvous.

        Args:
            rendezvous: This node's place where there are several.
        """
        variables = environment(threads, rendezvous.interface if rendezvous else "")
        return WorkerGroup(
            task=replace(task, environment=variables),
            workers=workers,
            threads=threads,
            interrupts=interrupts,
            spared=frozenset(descendants()),
            rendezvous=rendezvous,
        )


def environment(threads: int, interface: str = "") -> tuple[tuple[str, str], ...]:
    """Variables for the workers: their threads, and their sockets' interface unless the user chose.

    Args:
        interface: The network interface; empty for loopback.
    """
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    exact = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
    interfaces = {
        name: environ.get(name, value if interface else loopback) for name, value in exact.items()
    }
    numbers = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    late = {name: environ[name] for name in forkserver.AT_IMPORT if name in environ}
    return tuple({**interfaces, **numbers, **late}.items())


def attempt_here(
    group: WorkerGroup, attempt: int
) -> tuple[dict[int, str], tuple[WorkerFailure, ...]]:
    """Run this node's workers once. Call it in the main thread.

    Args:
        attempt: Its number; logs and the workers' environment have it.

    Returns:
        Results by rank, and failures with the root cause first; of this node's workers.

    Raises:
        InfrastructureError: Workers could not be started at all.
    """
    # The fork server imports torch while this process does so.
    forkserver.prepare((), group.threads)
    try:
        # Importing torch takes seconds on a busy machine.
        with group.interrupts.starting(), garbage_kept():
            from paceline.launch.local.elastic_agent import run_attempt
    except InterruptedStartError:
        return {}, ()
    server = forkserver.server_pid() or 0
    # What belongs to this attempt alone: a directory and the workers' variables.
    scratch = group.task.scratch / str(attempt)
    scratch.mkdir()
    variables = (
        *group.task.environment,
        ("PACELINE_ATTEMPT", str(attempt)),
        (SCRATCH_VARIABLE, str(scratch)),
    )
    task = replace(
        group.task, attempt=attempt, server_pid=server, scratch=scratch, environment=variables
    )
    # Run the workers. The out-of-memory counter is cumulative, so its value before them counts.
    kills_before, began_s = oom_kills(), time.monotonic()
    try:
        watch = partial(group.watch, attempt) if group.watch else None
        ending = run_attempt(task, group.workers, group.interrupts, group.rendezvous, watch)
    except (EOFError, ConnectionError) as error:
        raise InfrastructureError("the fork server ended while workers were started") from error
    finally:
        # The reaped processes must be gone before their shared memory is freed.
        reap(set(group.spared | {server}), server)
        free_shared(scratch)
    # Collect what they left: results, or else failures.
    results = _results(scratch, ending.exit_codes)
    if len(results) == group.workers:
        return results, ()
    failures = _failures(task, ending, results, _victims(began_s, oom_kills() - kills_before))
    if not (failures or ending.stop_requested or group.interrupts.abandoned):
        raise InfrastructureError("the workers ended without results, and none of them said why")
    return results, failures


def _victims(since_s: float, kills: int) -> frozenset[int] | None:
    """List the processes that were killed for want of memory; None: there were, of unknown ids.

    Args:
        since_s: From when on, by `time.monotonic`.
        kills: How many the counter of this control group has counted since then.
    """
    logged = oom_killed(since_s)
    return frozenset() if logged is None and not kills else logged


def _failures(
    task: WorkerTask,
    ending: WorkerExits,
    results: Mapping[int, str],
    victims: frozenset[int] | None,
) -> tuple[WorkerFailure, ...]:
    ranks = ending.exit_codes
    # What workers recorded themselves counts before what is inferred from outside.
    failures = _recorded(task.scratch, ranks) | _recorded(task.log_dir, ranks)
    # The others left no record: infer the cause from exit code, note, log and kernel.
    for rank, code in unrecorded(ending, failures, results).items():
        note = read_note(note_path(task.scratch, rank))
        failures[rank] = silent_failure(
            rank,
            code,
            host=socket.gethostname(),
            step=note.step,
            operation=note.operation,
            out_of_memory=None if victims is None else ending.pids.get(rank) in victims,
            crash=logs.read_crash(log_path(task.log_dir, rank)),
            ended_by=_ended_by(rank, code, ending, task),
        )
        record(failures[rank], task.log_dir)
    return root_cause(failures.values())


def _ended_by(rank: int, code: int, ending: WorkerExits, task: WorkerTask) -> EndedBy:
    if rank in ending.stopped:
        return "launcher"
    orphaned = code == _UNKNOWN and process_state(find_process(task.server_pid)) == "gone"
    return "fork server" if orphaned else "itself"


def _results(scratch: Path, ranks: Iterable[int]) -> dict[int, str]:
    paths = {rank: result_path(scratch, rank) for rank in ranks}
    return {rank: str(loads(path.read_text())) for rank, path in paths.items() if path.exists()}


def _recorded(log_dir: Path, ranks: Iterable[int]) -> dict[int, WorkerFailure]:
    failures = {}
    for rank in ranks:
        with suppress(OSError, ValueError):
            failures[rank] = WorkerFailure.from_json(read_json(failure_path(log_dir, rank)))
    return failures
