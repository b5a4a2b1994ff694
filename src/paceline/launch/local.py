"""Start the workers on this machine, restart them after a failure, and say how it ended."""

import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from json import loads
from os import environ
from pathlib import Path

from paceline.config.rundir import log_path
from paceline.errors import InfrastructureError
from paceline.launch import forkserver, logs
from paceline.launch.boundary import failure_path, read_note, record
from paceline.launch.failures import (
    Ending,
    WorkerFailure,
    one_line,
    root_cause,
    silent_failure,
    unrecorded,
)
from paceline.launch.lineage import adopt_orphans
from paceline.launch.oom import oom_kills
from paceline.launch.processes import descendants, reap
from paceline.launch.restarts import RestartBudget
from paceline.launch.signals import InterruptedStartError, Interrupts
from paceline.launch.worker import WorkerTask, note_path, result_path


@dataclass(frozen=True, kw_only=True)
class LaunchOutcome:
    """How a launch ended."""

    results: Mapping[int, str]
    """What the entry returned, by rank; complete unless it failed or was interrupted."""
    interrupted: bool
    """Whether the user or the system asked to stop."""
    failures: tuple[WorkerFailure, ...]
    """The last attempt's failures, root cause first; empty on success."""
    restarts: int


@dataclass(frozen=True, kw_only=True)
class _Launch:
    """What stays the same for all attempts."""

    task: WorkerTask
    workers: int
    threads: int
    interrupts: Interrupts
    spared: frozenset[int]


def prepare(preload: Sequence[str], threads: int) -> None:
    """Start the fork server early, so that it imports torch while this process does other things.

    Args:
        preload: Modules that the entry will need; they must not raise anything but ImportError.
        threads: CPU threads of each worker.
    """
    forkserver.prepare(preload, threads)


def launch_local(
    entry: str,
    payload: str,
    *,
    workers: int,
    threads: int,
    max_restarts: int,
    log_dir: Path,
    progress: Callable[[], int],
    report: Callable[[str], None] | None = None,
) -> LaunchOutcome:
    """Run a function in every worker on this machine.

    After a worker died or the infrastructure failed, all workers are started again, while the
    budget lasts. SIGINT, SIGTERM and SIGHUP reach the workers as SIGTERM; those that have not ended
    3.5 s later are killed, at the second signal at once. No process outlives the call but the fork
    server, which ends with this process. Call it in the main thread.

    Args:
        entry: `package.module:function`, a function (payload: str) -> str; called in every worker,
            with torch's variables (RANK, MASTER_ADDR ..) and PACELINE_ATTEMPT in its environment.
        payload: Its argument.
        workers: Number of workers.
        threads: CPU threads per worker.
        max_restarts: Restarts in a row without progress.
        log_dir: For `rank-<n>.log` and `failure-rank-<n>.json`.
        progress: Gives the newest good snapshot's step, -1 for none.
        report: Is told about restarts, a line each; standard error by default.

    Returns:
        How it ended. Failures of workers are in it, not raised.

    Raises:
        InfrastructureError: Workers could not be started at all.
    """
    say = report or _to_stderr
    forkserver.prepare((), threads)
    log_dir.mkdir(parents=True, exist_ok=True)
    for stale in log_dir.glob("*failure-rank-*.json"):
        stale.unlink(missing_ok=True)
    with _scratch() as scratch, _orphans_adopted(), Interrupts().caught() as interrupts:
        launch = _Launch(
            task=WorkerTask(
                entry=entry,
                payload=payload,
                log_dir=log_dir,
                scratch=scratch,
                attempt=0,
                server_pid=0,
                environment=_environment(threads),
            ),
            workers=workers,
            threads=threads,
            interrupts=interrupts,
            spared=frozenset(descendants()),
        )
        return _attempts(launch, RestartBudget.full(max_restarts, progress()), progress, say)


def _attempts(
    launch: _Launch,
    budget: RestartBudget,
    progress: Callable[[], int],
    say: Callable[[str], None],
) -> LaunchOutcome:
    attempt = 0
    while True:
        results, failures = _attempt(launch, attempt)
        done = LaunchOutcome(
            results=results,
            interrupted=launch.interrupts.received,
            failures=failures,
            restarts=attempt,
        )
        if done.interrupted or not failures:
            return done
        step = progress()
        left = budget.spend(failures[0].kind, step)
        if left is None:
            return done
        budget = left
        attempt += 1
        _set_aside(launch.task.log_dir, attempt - 1, failures)
        say(_restart_line(failures[0], step, budget))


def _attempt(launch: _Launch, attempt: int) -> tuple[dict[int, str], tuple[WorkerFailure, ...]]:
    """Run all workers once: their results, and their failures with the root cause first."""
    forkserver.prepare((), launch.threads)
    try:
        with launch.interrupts.starting():  # importing torch takes seconds on a busy machine
            from paceline.launch.agent import run_attempt
    except InterruptedStartError:
        return {}, ()
    server = forkserver.server_pid() or 0
    scratch = launch.task.scratch / str(attempt)
    scratch.mkdir()
    environment = (*launch.task.environment, ("PACELINE_ATTEMPT", str(attempt)))
    task = replace(
        launch.task, attempt=attempt, server_pid=server, scratch=scratch, environment=environment
    )
    kills_before = oom_kills()
    try:
        ending = run_attempt(task, launch.workers, launch.interrupts)
    except (EOFError, ConnectionError) as error:
        raise InfrastructureError("the fork server ended while workers were started") from error
    finally:
        reap(set(launch.spared | {server}))
    results = _results(scratch, launch.workers)
    if len(results) == launch.workers:
        return results, ()
    return results, _failures(task, ending, results, out_of_memory=oom_kills() > kills_before)


def _failures(
    task: WorkerTask, ending: Ending, results: Mapping[int, str], out_of_memory: bool
) -> tuple[WorkerFailure, ...]:
    found = _recorded(task.log_dir, ending.exit_codes)
    for rank, code in unrecorded(ending, found, results).items():
        step, operation = read_note(note_path(task.scratch, rank))
        found[rank] = silent_failure(
            rank,
            code,
            host=socket.gethostname(),
            step=step,
            operation=operation,
            out_of_memory=out_of_memory,
            crash=logs.read_crash(log_path(task.log_dir, rank)),
            stopped=rank in ending.stopped,
        )
        record(found[rank], task.log_dir)
    if not found and not ending.stop_requested:
        raise InfrastructureError("the workers ended without results, and none of them said why")
    return root_cause(found.values())


def _results(scratch: Path, workers: int) -> dict[int, str]:
    paths = {rank: result_path(scratch, rank) for rank in range(workers)}
    return {rank: str(loads(path.read_text())) for rank, path in paths.items() if path.exists()}


def _recorded(log_dir: Path, ranks: Iterable[int]) -> dict[int, WorkerFailure]:
    found = {}
    for rank in ranks:
        with suppress(OSError, ValueError):
            content = loads(failure_path(log_dir, rank).read_text())
            found[rank] = WorkerFailure.from_json(content)
    return found


def _set_aside(log_dir: Path, attempt: int, failures: Iterable[WorkerFailure]) -> None:
    """Keep the records of a failed attempt under names that don't speak for the whole training."""
    for failure in failures:
        path = failure_path(log_dir, failure.rank)
        with suppress(FileNotFoundError):
            path.rename(path.with_name(f"attempt-{attempt}-{path.name}"))


def _restart_line(cause: WorkerFailure, step: int, budget: RestartBudget) -> str:
    since = "the start" if step < 0 else f"the snapshot of step {step}"
    return (
        f"{one_line(cause)}\n"
        f"All workers start again from {since} "
        f"(restart {budget.max_restarts - budget.left} of at most {budget.max_restarts} "
        "without a newer snapshot)"
    )


def _environment(threads: int) -> tuple[tuple[str, str], ...]:
    """Variables for the workers: their threads, and sockets on loopback unless the user chose."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    interfaces = {
        name: environ.get(name, loopback) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    }
    numbers = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return tuple({**interfaces, **numbers}.items())


@contextmanager
def _scratch() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="paceline-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _orphans_adopted() -> Iterator[None]:
    adopt_orphans(True)
    try:
        yield
    finally:
        adopt_orphans(False)


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
