"""One node's share of a training that several nodes run, each started by a service of its own."""

from collections.abc import Sequence
from pathlib import Path

from paceline.launch.local import forkserver
from paceline.launch.local.attempt import Crew, attempt_here
from paceline.launch.local.launcher import LaunchOutcome, orphans_adopted
from paceline.launch.local.worker import WorkerTask
from paceline.launch.node_seat import Seat
from paceline.launch.scratch import scratch_directory
from paceline.launch.signals import Interrupts


def launch_node(
    entry: str,
    payload: str,
    *,
    workers: int,
    threads: int,
    log_dir: Path,
    seat: Seat,
    stop_s: float,
    preload: Sequence[str] = (),
) -> LaunchOutcome:
    """Run a function in every worker of this node, once: the service restarts what failed.

    Every node calls it, in its main thread. Signals and ends are as with `launch_local`.

    Args:
        entry: `package.module:function`, a function (payload: str) -> str.
        payload: Its argument.
        workers: Of this node; nodes may have different numbers of them.
        threads: CPU threads per worker.
        log_dir: For `rank-<n>.log` and `failure-rank-<n>.json`.
        seat: This node's place, and the store, which somebody keeps already.
        stop_s: From a request to stop until workers are killed.
        preload: Modules that the entry will need.

    Returns:
        How this node's workers ended.

    Raises:
        InfrastructureError: The nodes didn't meet, or workers could not be started.
    """
    forkserver.prepare(preload, threads)
    caught = Interrupts(stop_s).caught()
    with scratch_directory() as scratch, orphans_adopted(), caught as interrupts:
        task = WorkerTask(
            entry=entry, payload=payload, log_dir=log_dir, scratch=scratch, shows_each_node=True
        )
        crew = Crew.of(task, workers, threads, interrupts, seat)
        results, failures = attempt_here(crew, 0)
        return LaunchOutcome(
            results=results, interrupted=interrupts.received, failures=failures, restarts=0
        )
