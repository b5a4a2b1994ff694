"""Starts the workers of a training, waits for them, and says how it ended."""

import json
import os
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.detect_worker import node_here, worker_here, workers_of_node
from paceline.cli.exit_messages import announce_end, announce_failure
from paceline.cli.run_dir_agreement import agree_on_run
from paceline.cli.write_report import write_report_apart
from paceline.data.options import DEFAULT_GLOBAL_BATCH, choose_global_batch
from paceline.distributed.environment import set_variables, thread_variables
from paceline.distributed.options import DistOptions
from paceline.distributed.placement import NodePlacement
from paceline.errors import ExitCode, InfrastructureError, UsageError
from paceline.launch.error_records import describe
from paceline.launch.signals import signals_raised
from paceline.launch.ssh.options import HostsOptions
from paceline.launch.worker_count import (
    choose_workers,
    may_have_gpus,
    threads_per_worker,
    usable_cores,
)
from paceline.metrics.tensorboard import require_tensorboard
from paceline.results.run_directory import RunDirectory
from paceline.training.config import TrainConfig
from paceline.training.request import TrainRequest
from paceline.training.sync.shard_validation import check_reproducible
from paceline.training.sync.validation import check_method

if TYPE_CHECKING:
    from paceline.launch.local.launcher import LaunchOutcome

RECIPE_ENTRY = "paceline.training.worker:run_training"
# Every optimizer imports torch._dynamo when it is built: here it is done once, for all workers.
PRELOAD = ("paceline.training.worker", "torch._dynamo")
_WAIT_FOR_RUN_DIR_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the workers of this training run."""

    here: bool
    """This process is a worker: torchrun (or the like) has started it, or the user asked for it."""
    rank: int = 0
    local_rank: int = 0
    workers: int = 1
    """Of this node, or of all where `here`."""
    nodes: int = 1
    threads: int = 1
    attempt: int = 0
    node: NodePlacement | None = None
    """This node's place, where each of several nodes starts its own workers."""
    hosts: HostsOptions | None = None
    """Hosts to reach by ssh; each then chooses its own workers."""
    started_apart: bool = False
    """Nobody has started all workers together: they agree on the run directory when they meet."""

    def started_at(self) -> datetime:
        """When the training was started; the same for all workers of a node."""
        if not self.here or self.workers == 1:
            return datetime.now(UTC)
        import psutil

        starter = os.getppid() or os.getpid()  # 0: it is outside of this container
        return datetime.fromtimestamp(psutil.Process(starter).create_time(), UTC)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A training about to start."""

    request: TrainRequest
    config: TrainConfig
    run: RunDirectory
    place: Place
    is_new: bool
    """Whether this begins a training, rather than going on with one."""
    entry: str = RECIPE_ENTRY
    """What every worker runs."""
    is_named: bool = True
    """Whether the user has named the run directory."""
    paths: tuple[str, ...] = ()
    """Names of the recipe's arguments that are paths."""

    @property
    def makes(self) -> bool:
        """Whether the run directory is to be made now: nothing has been trained in it yet."""
        return self.is_new and not (self.place.attempt and self.run.run_json.exists())


def choose_place(
    config: TrainConfig,
    usual_workers: int | None = None,
    hosts: HostsOptions | None = None,
) -> Place:
    """Decide where the workers run and how many there are; checks what can be checked by now.

    Args:
        config: The options.
        usual_workers: How many to start here where the options don't say: as many as before.
        hosts: Hosts to train on instead of this one, if they are named.

    Raises:
        UsageError: There aren't as many GPUs as asked for, or more workers than samples in a batch.
    """
    if hosts is not None and hosts.named:
        if config.launch.on != "auto":
            raise UsageError(f"--on {config.launch.on} and --hosts can't be combined")
        return Place(here=False, hosts=hosts)
    place = _here(config) or _on_node(config) or local_place(config, usual=usual_workers)
    check_workers(config, place.workers)
    return place


def check_workers(config: TrainConfig, workers: int) -> None:
    """Check what depends on the number of workers.

    Raises:
        UsageError: There are more of them than samples in a batch, or than shards.
    """
    choose_global_batch(config.data, DEFAULT_GLOBAL_BATCH, workers)
    check_reproducible(config, workers)
    check_method(config)


def warn_of_no_effect(place: Place, given: Collection[str]) -> None:
    """Say which given options mean nothing where something else has started the workers."""
    if place.here and "max_restarts" in given:
        print(
            "--max-restarts has no effect here: what started this process restarts it "
            "(torchrun has an option of the same name)",
            file=sys.stderr,
            flush=True,
        )


def start(launch: Launch) -> int:
    """Run a training to its end. Returns the exit code.

    Raises:
        UsageError: Something that can be checked by now is missing or in the way.
        InfrastructureError: The workers could not be started.
    """
    run = replace(launch.run, shared=launch.config.metrics.share_run_dir)
    launch = replace(launch, run=run)
    if launch.config.metrics.tensorboard:
        require_tensorboard()
    if launch.place.hosts is not None:
        from paceline.cli.start_ssh import start_on_hosts

        return start_on_hosts(launch, launch.place.hosts)
    if launch.place.node is not None:
        from paceline.cli.start_node import start_on_node

        return start_on_node(launch, launch.place.node)
    return _start_here(launch) if launch.place.here else _start_local(launch)


def _here(config: TrainConfig) -> Place | None:
    found = worker_here(config.launch, config.dist)
    if found is None:
        return None
    threads_per_worker(config.launch.threads, 1, usable_cores())  # refuses too many
    return Place(
        here=True,
        rank=found.rank,
        local_rank=found.local_rank,
        workers=found.world_size,
        nodes=found.nodes,
        attempt=found.attempt,
        started_apart=found.world_size > 1 and (found.source == "options" or not found.on_one_node),
    )


def _on_node(config: TrainConfig) -> Place | None:
    node = node_here(config.launch, config.dist)
    if node is None:
        return None
    place = local_place(config, asked=node.workers)
    return replace(place, rank=node.node_rank, nodes=node.nodes, node=node)


def local_place(
    config: TrainConfig, *, asked: int | None = None, usual: int | None = None
) -> Place:
    """Choose how many workers this machine gets, and their threads.

    Args:
        config: The options.
        asked: A number that counts before that of the options.
        usual: How many where nobody says.

    Raises:
        UsageError: There aren't as many GPUs as asked for.
    """
    options = config.dist
    if options.backend == "mpi":
        raise UsageError("--backend mpi: start the workers by mpirun, or choose another backend")
    gpus, cores = _gpus_for(options), usable_cores()
    by_device = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
    backend = by_device.get(options.device, options.backend)
    if usual is not None and gpus and backend != "gloo":
        usual = min(usual, gpus)  # this machine may have fewer than the last one
    wanted = asked or config.launch.workers or workers_of_node() or usual
    workers = choose_workers(wanted, gpus, cores, backend)
    if workers > max(cores, gpus):
        print(f"{workers} workers share {cores} CPU cores: expect no gain in speed", flush=True)
    omp = os.environ.get("OMP_NUM_THREADS")
    return Place(
        here=False,
        workers=workers,
        threads=threads_per_worker(config.worker_threads, workers, cores, omp),
    )


def _gpus_for(options: DistOptions) -> int:
    """Count the GPUs that workers of this machine may use, without importing torch in vain."""
    if options.device == "xpu" or (options.backend == "xccl" and options.device == "auto"):
        from paceline.distributed.device import xpu_count

        return xpu_count()
    if may_have_gpus() and options.device != "cpu":
        from paceline.distributed.device import gpu_count

        return gpu_count()
    if options.device == "cuda":
        raise UsageError("--device cuda needs a GPU, and this machine has none. Use --device cpu")
    return 0


def _start_local(launch: Launch) -> int:
    from paceline.launch.local.launcher import launch_local, prepare

    run, place = launch.run, launch.place
    if launch.makes:
        run.create()
    with run.lock(), run.swept():
        run.summary_json.unlink(missing_ok=True)  # of an earlier start
        try:
            with signals_raised():  # until the launch catches them itself
                prepare(PRELOAD, place.threads)
                outcome = launch_local(
                    launch.entry,
                    launch.request.to_json(),
                    workers=place.workers,
                    threads=place.threads,
                    policy=launch.config.policy(),
                    log_dir=run.logs,
                    progress=run.newest_step,
                )
        except KeyboardInterrupt:
            return announce_end(run, interrupted=True)
        return announce(run, outcome)


def announce(run: RunDirectory, outcome: "LaunchOutcome", again: Sequence[str] = ()) -> int:
    """Say how a launch ended. Returns the exit code.

    Args:
        run: The run directory.
        outcome: Of the launch.
        again: Options that a command to go on needs besides the run directory.
    """
    interrupted, failures = outcome.interrupted, outcome.failures
    if failures and not interrupted:
        return announce_failure(run, failures, again=again)
    return announce_end(run, interrupted=interrupted, failures=failures, again=again)


def _start_here(launch: Launch) -> int:
    if launch.place.started_apart:
        launch = agree_on_run(launch)
    elif not _made_on_one_node(launch):
        return ExitCode.USAGE  # the first worker says why
    run, place = launch.run, launch.place
    _wait_for(run.logs)
    with run.lock() if place.rank == 0 else nullcontext():
        if place.rank == 0:
            run.summary_json.unlink(missing_ok=True)  # of an earlier start
        try:
            stopped_because = _work_here(launch)
        except Exception as error:  # noqa: BLE001  # the process boundary: told and recorded
            failure = describe(error, place.rank)
            return announce_failure(run, [failure], write_report_apart if place.rank == 0 else None)
        interrupted = stopped_because == "signal"
        if place.rank == 0:
            return announce_end(run, interrupted=interrupted, write=write_report_apart)
        return ExitCode.RESUMABLE if interrupted else ExitCode.DONE


def _made_on_one_node(launch: Launch) -> bool:
    """Have the node's first worker make the run directory; False where an old one is in the way."""
    run, place = launch.run, launch.place
    if not launch.makes:
        return True
    if place.local_rank == 0:
        run.create()
        return True
    return not run.run_json.exists()  # it is written once all workers have met


def _work_here(launch: Launch) -> object:
    from paceline.launch.local.worker import run_here

    payload, logs, place = launch.request.to_json(), launch.run.logs, launch.place
    threads = launch.config.worker_threads
    if threads is not None:  # before torch and NumPy are imported, which read it
        set_variables(thread_variables(threads))
    text = run_here(
        launch.entry, payload, logs, place.rank, place.attempt, world_size=place.workers
    )
    result: Mapping[str, object] = json.loads(text)
    return result["stopped_because"]


def _wait_for(directory: Path) -> None:
    """Wait for the run directory, which the first worker of the node makes."""
    deadline_s = time.monotonic() + _WAIT_FOR_RUN_DIR_S
    while not directory.is_dir():
        if time.monotonic() > deadline_s:
            raise InfrastructureError(f"{directory} was not made by the first worker of this node")
        time.sleep(0.05)
