"""Start the workers on this machine, restart them after a failure, and say how it ended."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from paceline.errors import StorageError
from paceline.files import storing
from paceline.launch.errors.error_records import forget_failures, set_aside
from paceline.launch.errors.failures import WorkerFailure, one_line
from paceline.launch.local import forkserver
from paceline.launch.local.attempt import WorkerGroup, attempt_here
from paceline.launch.local.worker import NodeRendezvous, WorkerTask
from paceline.launch.process_tree import adopt_orphans
from paceline.launch.restart_policy import Policy, RestartBudget
from paceline.launch.scratch import scratch_directory
from paceline.launch.signals import Interrupts
from paceline.launch.watchdog.local_watchdog import watch_locally
from paceline.options.figures import plural
from paceline.options.text import above_progress, printable


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


def launch_local(
    entry: str,
    payload: str,
    *,
    workers: int,
    threads: int,
    policy: Policy,
    log_dir: Path,
    progress: Callable[[], int],
    rendezvous: NodeRendezvous | None = None,
) -> LaunchOutcome:
    """Run a function in every worker on this machine.

    After a worker died or the infrastructure failed, all workers are started again, while the
    budget lasts. SIGINT, SIGTERM and SIGHUP reach the workers as SIGTERM; those that have not ended
    in the policy's time are killed, at the second signal at once. No process outlives the call but
    the fork server, which ends with this process. Call it in the main thread.

    Args:
        entry: `package.module:function`, a function (payload: str) -> str; called in every worker,
            with torch's variables (RANK, MASTER_ADDR ..) and PACELINE_ATTEMPT in its environment.
        policy: How often they are started again, and after how long they hang.
        log_dir: For `rank-<n>.log` and `failure-rank-<n>.json`.
        progress: Gives the newest good snapshot's step, -1 for none.
        rendezvous: This machine's place among several nodes, each of which calls this; nodes may
            have different numbers of workers, and write into one `log_dir`. None: it is alone.

    Returns:
        How it ended, on this machine. Failures of workers are in it, not raised.

    Raises:
        InfrastructureError: The nodes didn't meet, or workers could not be started at all.
    """
    forkserver.prepare((), threads)
    log_dir.mkdir(0o700, parents=True, exist_ok=True)
    if rendezvous is None:  # others' records lie there as well
        forget_failures(log_dir)
    # Signals are caught first and released last, so that clean-up isn't cut off by one.
    caught = Interrupts(policy.stop, quietly(to_stderr)).caught()
    with caught as interrupts, scratch_directory() as scratch, orphans_adopted():
        group = WorkerGroup.of(
            WorkerTask(
                entry=entry,
                payload=payload,
                log_dir=log_dir,
                scratch=scratch,
                shows_each_node=rendezvous is not None,
            ),
            workers,
            threads,
            interrupts,
            rendezvous,
        )
        if (hang := policy.hang) is not None:
            group = replace(group, watch=partial(watch_locally, hang, log_dir, to_stderr))
        return _attempts(group, RestartBudget.full(policy.max_restarts, progress()), progress)


def _attempts(
    group: WorkerGroup, budget: RestartBudget, progress: Callable[[], int]
) -> LaunchOutcome:
    attempt = 0
    while True:
        results, failures = attempt_here(group, attempt)
        done = LaunchOutcome(
            results=results,
            interrupted=group.interrupts.received,
            failures=failures,
            restarts=attempt,
        )
        if done.interrupted or not failures:
            return done
        # Decide by the root cause and by the progress since the last restart.
        step = progress()
        left = budget.after(failures[0], step)
        if left is None:
            return done
        # New workers would fail at once, and hide the cause of this failure.
        if (problem := why_unwritable(group.task.log_dir)) is not None:
            to_stderr(f"The workers aren't started again: {problem}")
            return done
        # Restart: records of this attempt move aside before the next one writes its own.
        budget = left
        attempt += 1
        set_aside(group.task.log_dir, f"attempt-{attempt - 1}")
        to_stderr(restart_line(failures[0], step, budget))


def why_unwritable(log_dir: Path) -> str | None:
    """Say why a run directory takes no files any more, so that new workers would fail as well."""
    probe = log_dir / f".probe-{os.getpid()}"
    try:
        with storing(log_dir):
            probe.touch()  # takes no room: a disk that is only full is no reason
            probe.unlink()
    except (StorageError, OSError) as error:
        return str(error)
    return None


def restart_line(cause: WorkerFailure, step: int, budget: RestartBudget) -> str:
    """Say why all workers start again, and from where."""
    since = "the start" if step < 0 else f"the snapshot of step {step}"
    return (
        f"{one_line(cause)}\n"
        f"All workers start again from {since} "
        f"(restart {budget.max_restarts - budget.left} of at most {budget.max_restarts} "
        f"without a newer snapshot{_after_hangs(budget)})"
    )


def _after_hangs(budget: RestartBudget) -> str:
    return f"; so far {plural(budget.hangs, 'restart')} after a hang" if budget.hangs else ""


@contextmanager
def orphans_adopted() -> Iterator[None]:
    """Adopt orphans of workers in the block, so that they can be ended."""
    adopt_orphans(True)
    try:
        yield
    finally:
        adopt_orphans(False)


def to_stderr(line: str) -> None:
    """Print a line to standard error."""
    print(above_progress(printable(line)), file=sys.stderr, flush=True)


def quietly(print_line: Callable[[str], None]) -> Callable[[str], None]:
    """Wrap a function that prints a line: errors of a closed terminal are ignored."""

    def report_line(line: str) -> None:
        with suppress(OSError):
            print_line(line)

    return report_line
