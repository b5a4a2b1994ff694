"""Communication backends: their requirements, and which devices and types they support."""

import importlib

import torch
import torch.distributed as dist

from paceline.distributed.options import FEW_OPERATIONS
from paceline.errors import UsageError
from paceline.options.text import clause

_SMDDP_MODULE = "smdistributed.dataparallel.torch.torch_smddp"
_BESIDE_GLOO = {"nccl": "cuda", "xccl": "xpu"}


def load_backend(backend: str, device: torch.device) -> None:
    """Check that a backend can be used here; SageMaker's client is imported now and only now.

    Raises:
        UsageError: It can't; the message says what to do.
    """
    if backend == "smddp":
        _import_smddp()
    elif backend == "mpi" and not dist.is_mpi_available():
        raise UsageError(
            "--backend mpi needs a PyTorch that was built from source with MPI, and this one "
            "wasn't. Use --backend auto: under mpirun it works with Gloo and NCCL"
        )
    elif backend == "xccl" and not dist.is_xccl_available():
        raise UsageError(
            "--backend xccl needs PyTorch's build for Intel GPUs, and this one isn't. "
            "Use --backend auto"
        )
    # A backend that was registered may still lack this device's tensors.
    able = dist.Backend.backend_capability.get(backend, [])
    if device.type not in able:
        raise UsageError(
            f"--backend {backend} can't carry tensors of a {device.type} device, only of "
            f"{' or '.join(able) or 'none here'}. Choose another --backend or --device"
        )


def name_for_torch(backend: str) -> str:
    """Name the backends for `init_process_group`.

    The GPUs' backends stand beside Gloo, which carries control messages on the CPU. MPI and smddp
    stand alone: they carry those as well.
    """
    kind = _BESIDE_GLOO.get(backend)
    return f"cpu:gloo,{kind}:{backend}" if kind else backend


def has_few_operations(backend: str) -> bool:
    """Tell whether it is one of `FEW_OPERATIONS`."""
    return backend in FEW_OPERATIONS


def control_device(backend: str, device: torch.device) -> torch.device:
    """Say where control messages travel: on the CPU, but for smddp on the GPU."""
    return device if backend == "smddp" else torch.device("cpu")


def _import_smddp() -> None:
    try:
        importlib.import_module(_SMDDP_MODULE)
    except ImportError as error:
        raise UsageError(
            f"--backend smddp needs SageMaker's library ({_SMDDP_MODULE}), which isn't here "
            f"({clause(error)}). It comes with SageMaker's PyTorch containers; use --backend auto "
            "elsewhere"
        ) from error
