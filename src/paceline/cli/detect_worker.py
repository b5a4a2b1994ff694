"""Whether this process is a worker already, or is to start the workers of this machine."""

from dataclasses import replace

from paceline.distributed.environment import Findings, look, read_placement, surroundings
from paceline.distributed.options import DistOptions
from paceline.distributed.placement import NodePlacement, Placement
from paceline.errors import UsageError
from paceline.launch.options import LaunchOptions
from paceline.launch.worker_count import may_have_gpus

_INTERACTIVE = ("slurm", "openmpi", "mpich")
"""Where a world of one may be no more than a shell: `--workers` then starts workers locally."""


def worker_here(launch: LaunchOptions, dist: DistOptions) -> Placement | None:
    """Give this process's place as a worker; None where it is to start workers itself.

    Raises:
        UsageError: What started this process and the options contradict each other.
    """
    if launch.on == "local":
        return None
    environment = surroundings()
    findings = Findings(workers=(), nodes=()) if dist.rank is not None else look(environment)
    if dist.rank is not None or findings.workers:
        return _started(read_placement(environment, dist), launch)
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
    node = look(surroundings()).node
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
    """
    if launch.on != "auto" or dist.rank is not None:
        return None
    node = look(surroundings()).node
    if node is None or node.nodes == 1:
        return None
    return replace(node, workers=launch.workers or node.workers or _gpus(dist) or 1)


def _gpus(dist: DistOptions) -> int:
    if dist.device == "cpu" or dist.backend == "gloo" or not may_have_gpus():
        return 0
    from paceline.distributed.device import gpu_count

    return gpu_count()
