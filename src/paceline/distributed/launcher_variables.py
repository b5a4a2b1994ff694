"""What launchers that start one process per worker leave in the environment: pure functions."""

from collections.abc import Callable, Mapping

from paceline.distributed.placement import USUAL_PORT, Placement, Source
from paceline.distributed.slurm_lists import hosts_of, tasks_of_nodes
from paceline.distributed.variables import (
    Environment,
    first_integer,
    first_of,
    integer,
    port_of_job,
    port_of_name,
)

_LOOPBACK = "127.0.0.1"
_NO_STEP = 0xFFFFFFF0
"""From here on Slurm's step numbers stand for no step of tasks: the batch script, a shell."""
_OPENMPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid")


def from_torch(environment: Environment) -> Placement | None:
    """Read what torchrun, another elastic agent or a user by hand sets: RANK, WORLD_SIZE …"""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    world_size = integer(environment, "WORLD_SIZE", 1)
    local_rank = integer(environment, "LOCAL_RANK", 0)
    local_world_size = integer(environment, "LOCAL_WORLD_SIZE", local_rank + 1)
    return Placement(
        rank=integer(environment, "RANK", 0),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=integer(environment, "GROUP_RANK", 0),
        nodes=integer(
            environment, "GROUP_WORLD_SIZE", max(1, world_size // max(1, local_world_size))
        ),
        attempt=first_integer(environment, ("PACELINE_ATTEMPT", "TORCHELASTIC_RESTART_COUNT"), 0),
        source="torch",
        settled=world_size == 1 or "LOCAL_WORLD_SIZE" in environment,
        master_addr=environment.get("MASTER_ADDR", ""),
        master_port=integer(environment, "MASTER_PORT", 0),
    )


def from_openmpi(environment: Environment) -> Placement | None:
    """Read what Open MPI's mpirun sets: OMPI_COMM_WORLD_RANK …"""
    job = first_of(environment, *_OPENMPI_JOB)
    port = port_of_name(job) if job else USUAL_PORT
    return _from_mpi(environment, "openmpi", "OMPI_COMM_WORLD_", ("LOCAL_RANK", "LOCAL_SIZE"), port)


def from_mpich(environment: Environment) -> Placement | None:
    """Read what Hydra (MPICH, Intel MPI) sets: PMI_RANK, PMI_SIZE, MPI_LOCALRANKID …"""
    local = ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    found = _from_mpi(environment, "mpich", "PMI_", local, USUAL_PORT)
    return None if found and _same_as_slurms(found, environment) else found


def from_slurm(environment: Environment) -> Placement | None:
    """Read what srun sets in each task: SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID …"""
    step = integer(environment, "SLURM_STEP_ID", _NO_STEP)
    if "SLURM_PROCID" not in environment or step >= _NO_STEP:
        return None
    node = integer(environment, "SLURM_NODEID", 0)
    local_rank = integer(environment, "SLURM_LOCALID", 0)
    tasks = first_of(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    counts = tasks_of_nodes(tasks) if tasks else []
    known = node < len(counts)
    hosts = first_of(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    port = port_of_job(integer(environment, "SLURM_JOB_ID", 0), step)
    return Placement(
        rank=integer(environment, "SLURM_PROCID", 0),
        world_size=first_integer(environment, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), 1),
        local_rank=local_rank,
        local_world_size=counts[node] if known else local_rank + 1,
        node_rank=node,
        nodes=first_integer(environment, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES"), 1),
        attempt=integer(environment, "SLURM_RESTART_COUNT", 0),
        source="slurm",
        settled=known,
        master_addr=environment.get("MASTER_ADDR") or (next(hosts_of(hosts)) if hosts else ""),
        master_port=integer(environment, "MASTER_PORT", port),
    )


LAUNCHERS: Mapping[Source, Callable[[Environment], Placement | None]] = {
    "torch": from_torch,
    "openmpi": from_openmpi,
    "mpich": from_mpich,
    "slurm": from_slurm,
}
"""In the order in which they count: the innermost launcher first. torchrun may run inside of any
other, mpirun inside of a Slurm job (whose variables then are those of mpirun's own helper)."""


def _from_mpi(
    environment: Environment, source: Source, prefix: str, local: tuple[str, str], port: int
) -> Placement | None:
    if f"{prefix}RANK" not in environment or f"{prefix}SIZE" not in environment:
        return None
    own = prefix if source == "openmpi" else ""
    world_size = integer(environment, f"{prefix}SIZE", 1)
    local_rank = integer(environment, f"{own}{local[0]}", 0)
    size = environment.get(f"{own}{local[1]}")
    local_world_size = integer(environment, f"{own}{local[1]}", local_rank + 1)
    one_node = size is not None and local_world_size == world_size
    return Placement(
        rank=integer(environment, f"{prefix}RANK", 0),
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        source=source,
        settled=one_node,
        master_addr=environment.get("MASTER_ADDR") or (_LOOPBACK if one_node else ""),
        master_port=integer(environment, "MASTER_PORT", port),
    )


def _same_as_slurms(found: Placement, environment: Environment) -> bool:
    """Tell whether srun has set PMI's variables itself: its own say more."""
    slurm = from_slurm(environment)
    return slurm is not None and (slurm.rank, slurm.world_size) == (found.rank, found.world_size)
