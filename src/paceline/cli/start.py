"""Starts the workers of a training, waits for them, and says how it ended."""

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from paceline.cli.ending import announce_end, announce_failure
from paceline.config.rundir import RunDirectory
from paceline.data.options import DEFAULT_GLOBAL_BATCH, choose_global_batch
from paceline.errors import ExitCode, InfrastructureError, UsageError
from paceline.launch.boundary import describe
from paceline.launch.options import LaunchOptions
from paceline.launch.placement import (
    choose_workers,
    may_have_gpus,
    threads_per_worker,
    usable_cores,
)
from paceline.metrics.tensorboard import require_tensorboard
from paceline.trainer.config import TrainConfig
from paceline.trainer.request import TrainRequest

_ENTRY = "paceline.trainer.worker:run_training"
# Every optimizer imports torch._dynamo when it is built: here it is done once, for all workers.
_PRELOAD = ("paceline.trainer.worker", "torch._dynamo")
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

    def started_at(self) -> datetime:
        """When the training was started; the same for all workers of a node."""
        if not self.here or self.workers == 1:
            return datetime.now(UTC)
        import psutil

        return datetime.fromtimestamp(psutil.Process(os.getppid()).create_time(), UTC)


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A training about to start."""

    request: TrainRequest
    config: TrainConfig
    run: RunDirectory
    place: Place
    is_new: bool
    """Whether the run directory is to be made."""


def choose_place(config: TrainConfig, usual_workers: int | None = None) -> Place:
    """Decide where the workers run and how many there are; checks what can be checked by now.

    Args:
        config: The options.
        usual_workers: How many to start here where the options don't say: as many as before.

    Raises:
        UsageError: There aren't as many GPUs as asked for, or more workers than samples in a batch.
    """
    place = _here(config.launch) or _local(config, usual_workers)
    choose_global_batch(config.data, DEFAULT_GLOBAL_BATCH, place.workers)
    return place


def start(launch: Launch) -> int:
    """Run a training to its end. Returns the exit code.

    Raises:
        UsageError: Something that can be checked by now is missing or in the way.
    """
    if launch.config.metrics.tensorboard:
        require_tensorboard()
    return _start_here(launch) if launch.place.here else _start_local(launch)


def _here(options: LaunchOptions) -> Place | None:
    from paceline.dist.environment import read_placement, started_by_launcher

    if options.on == "local" or (options.on == "auto" and not started_by_launcher(os.environ)):
        return None
    found = read_placement(os.environ)
    if options.workers not in (None, found.world_size):
        raise UsageError(
            f"--workers {options.workers}, but {found.world_size} worker(s) have been started "
            "already. Leave --workers out here"
        )
    return Place(
        here=True,
        rank=found.rank,
        local_rank=found.local_rank,
        workers=found.world_size,
        nodes=found.nodes,
        attempt=found.attempt,
    )


def _local(config: TrainConfig, usual_workers: int | None) -> Place:
    gpus = 0
    if may_have_gpus() and config.dist.device != "cpu":
        from paceline.dist.device import gpu_count

        gpus = gpu_count()
    elif config.dist.device == "cuda":
        raise UsageError("--device cuda needs a GPU, and this machine has none. Use --device cpu")
    cores = usable_cores()
    by_device = {"cpu": "gloo", "cuda": "nccl"}
    backend = by_device.get(config.dist.device, config.dist.backend)
    if usual_workers is not None and gpus and backend != "gloo":
        usual_workers = min(usual_workers, gpus)  # this machine may have fewer than the last one
    workers = choose_workers(config.launch.workers or usual_workers, gpus, cores, backend)
    if workers > max(cores, gpus):
        print(f"{workers} workers share {cores} CPU cores: expect no gain in speed", flush=True)
    omp = os.environ.get("OMP_NUM_THREADS")
    return Place(
        here=False,
        workers=workers,
        threads=threads_per_worker(config.launch.threads, workers, cores, omp),
    )


def _start_local(launch: Launch) -> int:
    from paceline.launch.local import launch_local, prepare

    run, place = launch.run, launch.place
    if launch.is_new:
        run.create()
    with run.lock():
        run.summary_json.unlink(missing_ok=True)  # of an earlier start
        prepare(_PRELOAD, place.threads)
        try:
            outcome = launch_local(
                _ENTRY,
                launch.request.to_json(),
                workers=place.workers,
                threads=place.threads,
                max_restarts=launch.config.launch.max_restarts,
                log_dir=run.logs,
                progress=lambda: newest_step(run.snapshots),
            )
        except InfrastructureError as error:
            print(f"paceline: {error}", file=sys.stderr)
            return ExitCode.INFRASTRUCTURE
        if outcome.failures and not outcome.interrupted:
            return announce_failure(run, outcome.failures)
        return announce_end(run, interrupted=outcome.interrupted, failures=outcome.failures)


def _start_here(launch: Launch) -> int:
    run, place = launch.run, launch.place
    if place.local_rank == 0 and launch.is_new and not (place.attempt and run.run_json.exists()):
        run.create()
    _wait_for(run.logs)
    with run.lock() if place.rank == 0 else nullcontext():
        if place.rank == 0:
            run.summary_json.unlink(missing_ok=True)  # of an earlier start
        try:
            stopped_because = _work_here(launch)
        except Exception as error:  # noqa: BLE001  # the process boundary: told and recorded
            failure = describe(error, place.rank)
            return announce_failure(run, [failure], write_report=place.rank == 0)
        interrupted = stopped_because == "signal"
        if place.rank == 0:
            return announce_end(run, interrupted=interrupted)
        return ExitCode.RESUMABLE if interrupted else ExitCode.DONE


def _work_here(launch: Launch) -> object:
    from paceline.launch.worker import run_here

    payload, logs, place = launch.request.to_json(), launch.run.logs, launch.place
    result: Mapping[str, object] = json.loads(
        run_here(_ENTRY, payload, logs, place.rank, place.attempt)
    )
    return result["stopped_because"]


def newest_step(snapshots: Path) -> int:
    """Give the newest snapshot's step by its name; -1 where there is none."""
    names = (path.name.removeprefix("step-") for path in snapshots.glob("step-*"))
    return max((int(name) for name in names if name.isdecimal()), default=-1)


def _wait_for(directory: Path) -> None:
    """Wait for the run directory, which the first worker of the node makes."""
    deadline_s = time.monotonic() + _WAIT_FOR_RUN_DIR_S
    while not directory.is_dir():
        if time.monotonic() > deadline_s:
            raise InfrastructureError(f"{directory} was not made by the first worker of this node")
        time.sleep(0.05)
