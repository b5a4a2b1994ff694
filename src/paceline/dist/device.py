"""Which device a worker computes on."""

import platform
from pathlib import Path

import torch

from paceline.dist.environment import Placement
from paceline.dist.options import DistOptions
from paceline.errors import UsageError


def gpu_count() -> int:
    """Count the GPUs of this node without claiming one."""
    return torch.cuda.device_count()


def resolve_device_kind(options: DistOptions, gpus: int) -> str:
    """Decide between `cpu` and `cuda`, the same on every worker of a node.

    Raises:
        UsageError: GPUs were asked for and there are none.
    """
    wants_gpu = options.device == "cuda" or options.backend == "nccl"
    if wants_gpu and gpus == 0:
        asked = "--device cuda" if options.device == "cuda" else "--backend nccl"
        raise UsageError(f"{asked} needs a GPU, and this machine has none. Use --device cpu")
    if options.device == "auto":
        return "cpu" if options.backend == "gloo" or gpus == 0 else "cuda"
    return options.device


def pick_device(options: DistOptions, placement: Placement) -> torch.device:
    """Give this worker its device: the GPU numbered by its local rank, or the CPU.

    Raises:
        UsageError: The node has fewer GPUs than workers.
    """
    gpus = gpu_count()
    kind = resolve_device_kind(options, gpus)
    if kind == "cpu":
        return torch.device("cpu")
    if placement.local_rank >= gpus:
        raise UsageError(
            f"{placement.local_world_size} workers on this node need as many GPUs, "
            f"and there are {gpus}. Ask for --workers {gpus}, or use --device cpu"
        )
    device = torch.device("cuda", placement.local_rank)
    torch.cuda.set_device(device)
    return device


def resolve_backend(options: DistOptions, device: torch.device) -> str:
    """Name the backend of the gradients: nccl between GPUs, gloo between CPU workers."""
    if options.backend != "auto":
        return options.backend
    return "nccl" if device.type == "cuda" else "gloo"


def describe_device(device: torch.device) -> str:
    """Name the hardware for `run.json`, for example `NVIDIA H200` or `CPU (x86_64, AVX512)`."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"


def cpu_name() -> str:
    """Name the processor, for `run.json`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
