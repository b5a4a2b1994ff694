"""Where the workers of a training run, and how many: in this process, on this machine, on hosts."""

import os
import sys
from collections.abc import Collection
from dataclasses import replace

from paceline.data.options import choose_global_batch
from paceline.distributed.environment import (
    Findings,
    detect_launchers,
    read_environment,
    read_placement,
)
from paceline.distributed.options import DistOptions, refuse_several_on_mps
from paceline.distributed.placement import NodePlacement, Placement
from paceline.distributed.system_gpus import may_have_gpus
from paceline.errors import UsageError
from paceline.launch.options import LaunchOptions
from paceline.launch.ssh.options import HostsOptions
from paceline.launch.worker_count import (
    choose_workers,
    threads_per_worker,
    usable_cores,
)
from paceline.options.figures import plural
from paceline.runtime.spec import Place
from paceline.training.config import TrainConfig
from paceline.training.sync.validation import check_method, check_reproducible

_INTERACTIVE = ("slurm", "openmpi", "mpich")
"""Where a world of one may be no more than a shell: `--workers` then starts workers locally."""


def choose_place(
    config: TrainConfig,
    usual_workers: int | None = None,
    hosts: HostsOptions | None = None,
) -> Place:
    """Decide where the workers run and how many there are; checks what can be checked by now.

    Args:
        usual_workers: How many to start here where the options don't say: as many as before.
        hosts: Hosts to train on instead of this one, if they are named.

    Raises:
        UsageError: There aren't as many GPUs as asked for, or more workers than samples in a batch.
    """
    if hosts is not None and hosts.named:
        if config.launch.on != "auto":
            raise UsageError(f"--on {config.launch.on} and --hosts can't be combined")
        if config.dist.device == "mps":
            raise UsageError("--device mps and --hosts can't be combined: one worker trains there")
        return Place(here=False, hosts=hosts)
    place = _here(config) or _on_node(config) or local_place(config, usual=usual_workers)
    check_workers(config, place.workers)
    return place


def warn_of_no_effect(place: Place, given: Collection[str]) -> None:
    """Say which given options mean nothing where something else has started the workers."""
    if place.here and "max_restarts" in given:
        print(
            "--max-restarts has no effect here: what starts this process has to restart it "
            "(torchrun has an option of the same name)",
            file=sys.stderr,
            flush=True,
        )


def say_starting(place: Place, progress: str) -> None:
    """Tell a person at a terminal at once what happens: what comes next is slow.

    Args:
        place: Where the workers run; nothing is said of those that something else starts.
        progress: The option: nothing is said with `off`.
    """
    if place.here or place.hosts is not None or place.node is not None:
        return
    if progress != "off" and sys.stderr is not None and sys.stderr.isatty():
        print(f"Starting {plural(place.workers, 'worker')}", file=sys.stderr, flush=True)


def check_workers(config: TrainConfig, workers: int) -> None:
    """Check what depends on the number of workers.

    Raises:
        UsageError: There are more of them than samples in a batch, or than shards.
    """
    choose_global_batch(config.data, workers)
    check_reproducible(config, workers)
    check_method(config)


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
        attempt=found.attempt,
        started_apart=found.world_size > 1 and (found.source == "options" or not found.on_one_node),
    )


def _on_node(config: TrainConfig) -> Place | None:
    node = node_here(config.launch, config.dist)
    if node is None:
        return None
    place = local_place(config, requested=node.workers)
    return replace(place, rank=node.node_rank, node=node)


def local_place(
    config: TrainConfig, *, requested: int | None = None, usual: int | None = None
) -> Place:
    """Choose how many workers this machine gets, and their threads.

    Args:
        requested: A number that counts before that of the options.
        usual: How many by default.

    Raises:
        UsageError: There aren't as many GPUs as asked for.
    """
    options = config.dist
    if options.backend == "mpi":
        raise UsageError("--backend mpi: start the workers by mpirun, or choose another backend")
    if options.device == "mps":
        # No fork of a process that has loaded Apple's frameworks can use Metal: not of the fork
        # server either, from which workers come otherwise.
        refuse_several_on_mps(requested or config.launch.workers or workers_of_node() or 1)
        threads_per_worker(config.launch.threads, 1, usable_cores())
        return Place(here=True)
    gpus, cores = count_gpus(options.device, options.backend), usable_cores()
    if options.device == "cuda" and not may_have_gpus():
        raise UsageError("--device cuda needs a GPU, and this machine has none. Use --device cpu")
    by_device = {"cpu": "gloo", "cuda": "nccl", "xpu": "xccl"}
    backend = by_device.get(options.device, options.backend)
    # How many workers: the caller's number, the option, the service's, then that of the last time.
    if options.shares_gpus:
        backend, usual = "gloo", usual or gpus or None
    elif usual is not None and gpus:
        usual = min(usual, gpus)  # this machine may have fewer than the last one
    wanted = requested or config.launch.workers or workers_of_node() or usual
    workers = choose_workers(wanted, gpus, cores, backend)
    if workers > max(cores, gpus):
        print(f"{workers} workers share {cores} CPU cores: expect no gain in speed", flush=True)
    omp = os.environ.get("OMP_NUM_THREADS")
    return Place(
        here=False,
        workers=workers,
        threads=threads_per_worker(config.worker_threads, workers, cores, omp),
    )


def count_gpus(device: str, backend: str) -> int:
    """Count the GPUs that workers of this machine may use, without importing torch in vain.

    Args:
        device: As in `DistOptions`.
        backend: As in `DistOptions`.
    """
    if device in ("xpu", "mps") or (backend == "xccl" and device == "auto"):
        from paceline.distributed.device import device_count

        return device_count("xpu" if device == "auto" else device)
    if device == "cpu" or (backend == "gloo" and device == "auto") or not may_have_gpus():
        return 0
    from paceline.distributed.device import gpu_count

    return gpu_count()


def worker_here(launch: LaunchOptions, dist: DistOptions) -> Placement | None:
    """Give this process's place as a worker; None where it is to start workers itself.

    Raises:
        UsageError: What started this process and the options contradict each other.
    """
    if launch.on in ("local", "node"):
        return None
    # Explicit options count before what a launcher has set.
    environment = read_environment()
    findings = (
        Findings(workers=(), nodes=()) if dist.rank is not None else detect_launchers(environment)
    )
    if dist.rank is not None or findings.workers:
        return _started(read_placement(environment, dist), launch)
    # A service has started one process a node: that isn't a worker, unless the user says so.
    if findings.node is not None and findings.node.nodes > 1:
        return findings.node.only_worker() if launch.on == "here" else None
    if dist.init_method is not None:
        raise UsageError(
            f"--init-method {dist.init_method} needs --rank and --world-size, or a launcher that "
            "says them (torchrun, srun, mpirun). Workers of this machine alone need none of them"
        )
    return Placement() if launch.on == "here" else None


def workers_of_node() -> int | None:
    """Give the number of workers that a service wants on this node, where it is the only one."""
    node = detect_launchers(read_environment()).node
    return node.workers if node is not None and node.nodes == 1 else None


def _started(found: Placement, launch: LaunchOptions) -> Placement | None:
    if launch.workers in (None, found.world_size):
        return found
    if found.world_size == 1 and found.source in _INTERACTIVE and launch.on == "auto":
        return None
    raise UsageError(
        f"--workers {launch.workers}, but {found.world_size} worker(s) have been started "
        "already. Leave --workers out here"
    )


def node_here(launch: LaunchOptions, dist: DistOptions) -> NodePlacement | None:
    """Give this node's place, where a service has started one process on each of several nodes.

    Returns:
        With the number of workers that this node is to start; None where there is no such service.

    Raises:
        UsageError: `--on node` was given where nothing says which node this is.
    """
    if launch.on not in ("auto", "node") or dist.rank is not None:
        return None
    findings = detect_launchers(read_environment())
    node = findings.node
    if launch.on == "node":
        if not findings.nodes:
            raise UsageError("--on node is for what srun has started once a node; nothing has here")
        node = findings.nodes[0]
    if node is None or node.nodes == 1:
        return None
    gpus = count_gpus(dist.device, dist.backend)
    return replace(node, workers=launch.workers or node.workers or gpus or 1)
