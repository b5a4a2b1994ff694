"""Reads environment variables, for all modules of a worker: placement, addresses, threads.

What each launcher's variables mean is in `launcher_variables`, as pure functions.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.distributed.launcher_variables import LAUNCHERS, NODES, Environment, hosts_of, integer
from paceline.distributed.options import DistOptions
from paceline.distributed.placement import USUAL_PORT, NodePlacement, Placement
from paceline.errors import UsageError

INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
NUMERIC_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLASLT_WORKSPACE_SIZE",
    "CUBLAS_WORKSPACE_CONFIG",
    "DNNL_DEFAULT_FPMATH_MODE",
    "DNNL_MAX_CPU_ISA",
    "HIPBLASLT_ALLOW_TF32",
    "HSA_OVERRIDE_GFX_VERSION",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "NVIDIA_TF32_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "PYTORCH_MIOPEN_SUGGEST_NHWC",
    "PYTORCH_TUNABLEOP_ENABLED",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TORCH_BLAS_PREFER_HIPBLASLT",
)
"""Variables by which libraries choose their arithmetic."""
NUMERIC_PREFIXES = (
    "MIOPEN_CONVOLUTION_",
    "MIOPEN_DEBUG_",
    "MIOPEN_FIND_",
    "ROCBLAS_DEFAULT_",
    "ROCBLAS_INTERNAL_",
    "ROCBLAS_USE_",
)
"""What others of them begin with: those of ROCm's libraries, of which each version has its own."""
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""What thread pools read while they are imported, NumPy's as well."""
PINNED_VARIABLE = "PACELINE_PINNED_THREADS"
"""With how many CPU threads this process has run from the script's first line, where settled."""
STORE_VARIABLE = "PACELINE_STORE"
"""In which the launcher names the workers' store, as PORT:FILE."""
REQUEST_VARIABLE = "PACELINE_REQUEST"
"""In which `paceline run` hands its request to the script."""
AGENT_STORE_VARIABLE = "TORCHELASTIC_USE_AGENT_STORE"
"""Whether a launcher keeps the store in which torch's processes meet."""
_SAGEMAKER_RESOURCES = Path("/opt/ml/input/config/resourceconfig.json")


@dataclass(frozen=True, kw_only=True)
class Findings:
    """All placements that launchers' variables imply, in order of precedence."""

    workers: tuple[Placement, ...]
    """From launchers that start a process per worker, the innermost first."""
    nodes: tuple[NodePlacement, ...]
    """From services that start a process per node."""
    problems: tuple[str, ...] = ()
    """Of launchers further out, which don't count anyway."""

    @property
    def started(self) -> bool:
        """Whether this process has been started as one of several workers, or as the only one."""
        return bool(self.workers)

    @property
    def node(self) -> NodePlacement | None:
        """This node, where there is one process per node."""
        return self.nodes[0] if self.nodes and not self.workers else None


def read_environment(resources: Path = _SAGEMAKER_RESOURCES) -> Environment:
    """Give this process's environment, with SageMaker's file under the names of its variables."""
    environment = current_variables()
    if "SM_HOSTS" in environment:
        return environment
    try:
        content = json.loads(resources.read_text())
        hosts, own = json.dumps(content["hosts"]), str(content["current_host"])
    except (OSError, ValueError, TypeError, KeyError):
        return environment
    return environment | {"SM_HOSTS": hosts, "SM_CURRENT_HOST": own}


def detect_launchers(environment: Environment) -> Findings:
    """Read every launcher's variables.

    A launcher that doesn't name the host of rank 0 takes it from one further out: mpirun inside of
    a Slurm job, for example.

    Raises:
        UsageError: A variable of the launcher that counts isn't a whole number, or its variables
            contradict each other.
    """
    workers: list[Placement] = []
    nodes: list[NodePlacement] = []
    problems: list[str] = []
    # All launchers in order of precedence; one that is misread after another was found is only
    # noted.
    for read in (*LAUNCHERS.values(), *NODES.values()):
        try:
            placement = read(environment)
        except UsageError as error:
            if not workers:
                raise
            if str(error) not in problems:  # Slurm's variables are read twice
                problems.append(str(error))
            continue
        if isinstance(placement, Placement):
            workers.append(placement)
        elif placement is not None:
            nodes.append(placement)
    # Some launchers (mpirun) give ranks but no address: another one's address completes them.
    named = [worker.master_addr for worker in workers] + [node.master_addr for node in nodes]
    address = next(filter(None, named), "") or _first_slurm_host(environment)
    return Findings(
        workers=tuple(w if w.master_addr else replace(w, master_addr=address) for w in workers),
        nodes=tuple(nodes),
        problems=tuple(problems),
    )


def current_placement(options: DistOptions | None = None) -> Placement:
    """Read this process's place; see `read_placement`."""
    return read_placement(read_environment(), options)


def read_placement(environment: Environment, options: DistOptions | None = None) -> Placement:
    """Read this worker's place: from the options, else from whoever started it.

    Args:
        options: Of which `rank`, `world_size` and `local_rank` count before the environment.

    Raises:
        UsageError: A variable isn't a whole number, or they contradict each other.
    """
    options = options or DistOptions()
    if options.rank is not None and options.world_size is not None:
        return _by_hand(environment, options.rank, options.world_size, options.local_rank)
    findings = detect_launchers(environment)
    if findings.workers:
        return findings.workers[0]
    if findings.node is not None and findings.node.nodes > 1:
        return findings.node.only_worker()
    return Placement()


def uses_agent_store(environment: Environment) -> bool:
    """Tell whether torch's elastic agent keeps the store at MASTER_ADDR and MASTER_PORT."""
    return environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def store_file(environment: Environment) -> str:
    """Name the file in which our launcher has the workers of one machine meet; empty for none.

    It holds for the port that this launcher has named: a script that starts workers by another one
    (torchrun, say) hands our variable on to them, and a script may set a port of its own.
    """
    port, _, path = environment.get(STORE_VARIABLE, "").partition(":")
    is_ours = uses_agent_store(environment) and environment.get("MASTER_PORT") == port
    return path if is_ours else ""


def chosen_interface(environment: Environment) -> str:
    """Give the interface that the user (or our launcher) has set for Gloo; empty for none."""
    return environment.get("GLOO_SOCKET_IFNAME", "")


def threads_are_set() -> bool:
    """Tell whether somebody has set the number of CPU threads; our launcher always does."""
    return bool(os.environ.get("OMP_NUM_THREADS"))


def thread_variables(threads: int) -> dict[str, str]:
    """Give the variables that settle a process's CPU threads from its first line."""
    return dict.fromkeys((*THREAD_VARIABLES, PINNED_VARIABLE), str(threads))


def gpu_slices() -> list[str]:
    """Name the slices of GPUs (MIG) that CUDA_VISIBLE_DEVICES lists; none where it lists others."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return listed if all(name.startswith("MIG-") for name in listed) else []


def wants_cuda_sanitizer() -> bool:
    """Tell whether torch's CUDA sanitizer (races between streams) is turned on."""
    return "TORCH_CUDA_SANITIZER" in os.environ


def threads_from_start() -> bool:
    """Tell whether CPU threads were settled before the script's first line."""
    return PINNED_VARIABLE in os.environ


def numeric_variables() -> dict[str, str]:
    """Give the variables by which libraries choose their arithmetic, where they are set."""
    named = {name: os.environ[name] for name in NUMERIC_VARIABLES if name in os.environ}
    others = sorted(name for name in os.environ if name.startswith(NUMERIC_PREFIXES))
    return named | {name: os.environ[name] for name in others}


def use_interface(name: str, *, override: bool) -> None:
    """Tell Gloo and NCCL which network interface to use, in this process.

    Args:
        name: The interface. NCCL gets it with `=`, since it matches beginnings of names otherwise.
        override: Whether it counts before what has been set.
    """
    for variable, value in zip(INTERFACE_VARIABLES, (name, f"={name}"), strict=True):
        if override or not os.environ.get(variable):
            os.environ[variable] = value


def _by_hand(
    environment: Environment, rank: int, world_size: int, local_rank: int | None
) -> Placement:
    return Placement(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank or 0,
        local_world_size=(local_rank or 0) + 1,
        source="options",
        settled=world_size == 1,
        master_addr=environment.get("MASTER_ADDR", ""),
        master_port=integer(environment, "MASTER_PORT", USUAL_PORT),
    )


def _first_slurm_host(environment: Environment) -> str:
    """mpirun places rank 0 on the first host of the job that it was started in."""
    nodes = environment.get("SLURM_JOB_NODELIST")
    return next(hosts_of(nodes)) if nodes else ""


def launcher_request() -> str | None:
    """Give the request that `paceline run` has handed to the script in this process, if it has."""
    return os.environ.get(REQUEST_VARIABLE)


def current_variables() -> dict[str, str]:
    """Give all environment variables of this process."""
    return dict(os.environ)


@contextmanager
def without_variables(*names: str) -> Iterator[None]:
    """Hide environment variables from processes that are started in this block."""
    kept = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(kept)


def set_variables(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process, a worker that doesn't know its place yet."""
    os.environ.update(variables)
