"""Parses environment variables of launchers (a process a worker) and services (a process a node).
Pure functions. Slurm writes hosts as `node[01-03,7]`, and tasks per node as `2(x3),1`.
"""

import json
import re
import zlib
from collections.abc import Callable, Iterator, Mapping

from paceline.distributed.placement import USUAL_PORT, NodePlacement, Placement, Source
from paceline.errors import UsageError
from paceline.options.quantities import parse_count

Environment = Mapping[str, str]

_FIRST_PORT, _PORTS = 20_000, 12_000
"""Below the ports that Linux hands out by itself (32768 and up)."""


def integer(environment: Environment, name: str, default: int) -> int:
    """Read a whole number.

    Raises:
        UsageError: The variable holds something else.
    """
    text = environment.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"the variable {name} should be a whole number, not {text!r}") from None


def first_of(environment: Environment, *names: str) -> str:
    """Give the first of these variables that isn't empty; an empty text where none is."""
    return next((environment[name] for name in names if environment.get(name)), "")


def first_integer(environment: Environment, names: tuple[str, ...], default: int) -> int:
    """Read the first of these variables that is set."""
    first = next((name for name in names if environment.get(name)), None)
    return default if first is None else integer(environment, first, default)


def port_of_job(job: int, step: int = 0) -> int:
    """Derive a port from a job's number, so that two jobs on one node don't meet."""
    return _FIRST_PORT + (job + 1000 * step) % _PORTS


def port_of_name(job: str) -> int:
    """Derive a port from a job's name."""
    return port_of_job(zlib.crc32(job.encode()))


_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hosts_of(text: str) -> Iterator[str]:
    """Name the hosts of a compressed list, in its order.

    Args:
        text: For example `gpu-a,rack[1-2]n[08-10,12]`.

    Raises:
        UsageError: It isn't such a list.
    """
    if not text or ",".join(_PART.findall(text)) != text:
        raise UsageError(f"not a list of hosts as Slurm writes it: {text!r}")
    for part in _PART.findall(text):
        yield from _expanded(part)


def tasks_of_nodes(text: str) -> list[int]:
    """Give the number of tasks of each node.

    Args:
        text: For example `4,2` or `2(x3),1`.

    Raises:
        UsageError: It isn't such a list.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"not tasks per node as Slurm writes them: {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expanded(part: str) -> Iterator[str]:
    bracket = _BRACKET.search(part)
    if bracket is None:
        yield part
        return
    before, after = part[: bracket.start()], part[bracket.end() :]
    for number in _numbers(bracket[1], part):
        yield from _expanded(f"{before}{number}{after}")


def _numbers(ranges: str, part: str) -> Iterator[str]:
    """Count through `08-10,12`, keeping leading zeros."""
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        if match is None:
            raise UsageError(f"not a list of hosts as Slurm writes it: {part!r}")
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"


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
    placement = _from_mpi(environment, "mpich", "PMI_", local, USUAL_PORT)
    return None if placement and _same_as_slurms(placement, environment) else placement


def from_slurm(environment: Environment) -> Placement | None:
    """Read what srun sets in each task: SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID …"""
    step = integer(environment, "SLURM_STEP_ID", _NO_STEP)
    if "SLURM_PROCID" not in environment or step >= _NO_STEP:
        return None
    # A step (srun) may have fewer tasks than its job: the variables of the step come first.
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
    # Open MPI's variables of the local rank have its prefix, MPICH's don't.
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


def _same_as_slurms(placement: Placement, environment: Environment) -> bool:
    """Tell whether srun has set PMI's variables itself: its own say more."""
    slurm = from_slurm(environment)
    return slurm is not None and (slurm.rank, slurm.world_size) == (
        placement.rank,
        placement.world_size,
    )


def from_kubeflow(environment: Environment) -> NodePlacement | None:
    """Read what Kubeflow's trainer sets (torchrun's own options): PET_NODE_RANK, PET_NNODES …"""
    if "PET_NODE_RANK" not in environment or "PET_NNODES" not in environment:
        return None
    nodes = parse_count(environment["PET_NNODES"])
    if nodes is None:
        raise UsageError(
            f"PET_NNODES is {environment['PET_NNODES']!r}: a training needs a fixed number of "
            "nodes, such as 2"
        )
    workers = environment.get("PET_NPROC_PER_NODE", "auto")
    return NodePlacement(
        node_rank=integer(environment, "PET_NODE_RANK", 0),
        nodes=nodes,
        workers=None if workers in ("auto", "gpu", "cpu") else _count(workers),
        source="kubeflow",
        master_addr=first_of(environment, "PET_MASTER_ADDR", "MASTER_ADDR"),
        master_port=integer(environment, "PET_MASTER_PORT", USUAL_PORT),
    )


def from_sagemaker(environment: Environment) -> NodePlacement | None:
    """Read what SageMaker sets: SM_HOSTS, SM_CURRENT_HOST, SM_NUM_GPUS.

    The same names stand for the container's resourceconfig.json, see `read_environment`.
    """
    if "SM_HOSTS" not in environment or "SM_CURRENT_HOST" not in environment:
        return None
    hosts, own = _names(environment["SM_HOSTS"]), environment["SM_CURRENT_HOST"]
    if own not in hosts:
        raise UsageError(f"SM_CURRENT_HOST is {own!r}, which is none of SM_HOSTS: {hosts}")
    gpus = environment.get("SM_NUM_GPUS")
    return NodePlacement(
        node_rank=hosts.index(own),
        nodes=len(hosts),
        workers=None if gpus is None else max(1, _count(gpus)),
        source="sagemaker",
        master_addr=environment.get("MASTER_ADDR", hosts[0]),
        master_port=integer(environment, "MASTER_PORT", USUAL_PORT),
    )


def from_skypilot(environment: Environment) -> NodePlacement | None:
    """Read what SkyPilot sets: SKYPILOT_NODE_RANK, SKYPILOT_NODE_IPS, SKYPILOT_NUM_GPUS_PER_NODE.

    The first address is the head's.
    """
    addresses = environment.get("SKYPILOT_NODE_IPS", "").split()
    if "SKYPILOT_NODE_RANK" not in environment or not addresses:
        return None
    gpus = environment.get("SKYPILOT_NUM_GPUS_PER_NODE")
    return NodePlacement(
        node_rank=integer(environment, "SKYPILOT_NODE_RANK", 0),
        nodes=integer(environment, "SKYPILOT_NUM_NODES", len(addresses)),
        workers=None if gpus is None else max(1, _count(gpus)),
        source="skypilot",
        master_addr=environment.get("MASTER_ADDR", addresses[0]),
        master_port=integer(environment, "MASTER_PORT", USUAL_PORT),
    )


def slurm_node(environment: Environment) -> NodePlacement | None:
    """Read the place of a node on which srun has started one task, its supervisor."""
    task = from_slurm(environment)
    if task is None:
        return None
    return NodePlacement(
        node_rank=task.node_rank,
        nodes=task.nodes,
        workers=None,
        source="slurm",
        master_addr=task.master_addr,
        master_port=task.master_port,
    )


NODES: Mapping[Source, Callable[[Environment], NodePlacement | None]] = {
    "kubeflow": from_kubeflow,
    "sagemaker": from_sagemaker,
    "skypilot": from_skypilot,
    "slurm": slurm_node,
}
"""In the order in which they count; all of them after the launchers of workers."""


def _count(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise UsageError(f"not a number of workers: {text!r}") from None


def _names(text: str) -> list[str]:
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
        raise UsageError(f"SM_HOSTS should be a JSON list of names, not {text!r}")
    return sorted(names)
