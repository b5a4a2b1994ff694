"""Which device a worker computes on."""

import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.distributed.environment import gpu_slices, set_variables, wants_cuda_sanitizer
from paceline.distributed.options import DistOptions, refuse_several_on_mps
from paceline.distributed.placement import Placement
from paceline.distributed.system_gpus import may_have_gpus
from paceline.errors import UsageError

_BACKENDS_DEVICE = {"nccl": "cuda", "smddp": "cuda", "xccl": "xpu", "gloo": "cpu", "mpi": "cpu"}
"""What `--device auto` means with each backend."""
_MAY_SHOW_ONE_GPU = ("slurm", "openmpi", "mpich")


@dataclass(frozen=True, kw_only=True)
class DeviceFeatures:
    """PyTorch's features and functions for one kind of device."""

    noun: str
    backend: str = "gloo"
    """What carries gradients between such devices, by default."""
    has_float64: bool = True
    copies_beside: bool = True
    """Whether a stream of its own copies from and to pinned memory beside the computing one."""
    has_foreach: bool = True
    """Whether kernels for lists of tensors are its own, and torch takes `foreach=True` there."""
    has_fused: bool = True
    """Whether optimizers' fused kernels are known to leave out steps that overflow in fp16."""
    reports_bf16: bool = True
    """Whether torch tells if bf16 is multiplied in hardware."""
    counts_memory: bool = True
    """Whether torch counts how much memory tensors have taken at most."""
    has_nondeterministic: bool = False
    """Whether some of its kernels give other bits every time."""


_KINDS: Mapping[str, DeviceFeatures] = {
    "cpu": DeviceFeatures(
        noun="the CPU",
        copies_beside=False,
        has_fused=False,
        reports_bf16=False,
        counts_memory=False,
    ),
    "cuda": DeviceFeatures(noun="a GPU", backend="nccl", has_nondeterministic=True),
    "xpu": DeviceFeatures(noun="an Intel GPU", backend="xccl"),
    # A copy that isn't waited for may read host memory that is another tensor's by then
    # (pytorch/pytorch#139550, #189690, open in torch 2.15).
    "mps": DeviceFeatures(
        noun="an Apple GPU",
        has_float64=False,
        copies_beside=False,
        has_foreach=False,
        has_fused=False,
        reports_bf16=False,
        counts_memory=False,
    ),
}
_ANY_OTHER = DeviceFeatures(
    noun="a device", copies_beside=False, has_fused=False, reports_bf16=False, counts_memory=False
)


def features(device: torch.device) -> DeviceFeatures:
    """Say what PyTorch has for a device."""
    return _KINDS.get(device.type, _ANY_OTHER)


def gpu_count() -> int:
    """Count this node's GPUs (or slices of them) without claiming one, as its launcher does."""
    if not may_have_gpus():
        return 0
    return len(gpu_slices()) or torch.cuda.device_count()


def device_count(kind: str) -> int:
    """Count this node's devices of one kind: `cuda`, `xpu` or `mps`."""
    count: Mapping[str, Callable[[], int]] = {
        "cuda": gpu_count,
        "xpu": torch.xpu.device_count,
        "mps": torch.mps.device_count,
    }
    return count[kind]()


def wanted_device_kind(options: DistOptions) -> str:
    """Name the kind of device that the options ask for: `auto` where that is left open."""
    if options.device != "auto":
        return options.device
    return _BACKENDS_DEVICE.get(options.backend, "auto")


def resolve_device_kind(options: DistOptions, count: Callable[[str], int] = device_count) -> str:
    """Decide between `cpu`, `cuda`, `xpu` and `mps`, the same on every worker of a node.

    Args:
        options: What was asked for. NVIDIA's and AMD's GPUs are taken where nothing was.
        count: Gives how many devices of a kind are here.

    Raises:
        UsageError: GPUs were asked for and there are none.
    """
    kind = wanted_device_kind(options)
    if kind == "auto":
        return "cuda" if count("cuda") else "cpu"
    if kind != "cpu" and not count(kind):
        flag = f"--backend {options.backend}" if options.device == "auto" else f"--device {kind}"
        raise UsageError(
            f"{flag} needs {_KINDS[kind].noun}, and this machine has none. Use --device cpu"
        )
    return kind


def pick_device(options: DistOptions, placement: Placement) -> torch.device:
    """Give this worker its device: the GPU numbered by its local rank, or the CPU.

    Raises:
        UsageError: The node has fewer GPUs than workers, or no backend joins such devices.
    """
    kind = resolve_device_kind(options)
    if kind == "cpu":
        return torch.device("cpu")
    if kind == "mps":
        return _mps_device(placement)
    count = device_count(kind)
    index = device_index(options, placement, count)
    if kind == "cuda":
        return _cuda_device(index, count)
    device = torch.device(kind, index)
    torch.accelerator.set_device_index(device)
    return device


def _mps_device(placement: Placement) -> torch.device:
    """Begin to use an Apple GPU.

    Raises:
        UsageError: There are several workers, or Metal can't be used in this process.
    """
    refuse_several_on_mps(placement.world_size)
    if torch.mps._is_in_bad_fork():
        raise UsageError(
            "this worker is forked from a process that has used the GPU already, and Metal can't "
            "be used in it any more: restart that process, and train in it with paceline.session() "
            "rather than paceline.notebook_launcher"
        )
    return torch.device("mps", 0)


def _cuda_device(index: int, gpus: int) -> torch.device:
    """Begin to use CUDA.

    Raises:
        UsageError: It can't be used in this process, or shows fewer GPUs than were counted.
    """
    # CUDA shows one slice to a process at most: this one sees its own alone.
    if slices := gpu_slices():
        set_variables({"CUDA_VISIBLE_DEVICES": slices[index]})
        index, gpus = 0, 1
    try:
        torch.cuda.init()
    except RuntimeError as error:
        if "forked subprocess" not in str(error):
            raise
        raise UsageError(
            "this worker is forked from a process that has asked CUDA's driver something already, "
            "and CUDA can't be used in it any more. Restart that process, and import paceline "
            "before the first question: torch.cuda.is_available() and device_count() then ask NVML "
            "(where there is NVML, and PYTORCH_NVML_BASED_CUDA_CHECK isn't 0)"
        ) from error
    except torch.cuda.DeferredCudaCallError as error:
        # torch 2.11 takes the driver's library's count, and asks each GPU for its properties.
        visible = torch._C._cuda_getDeviceCount()
        if index >= visible:
            raise _fewer_gpus(gpus, visible) from error
        torch.cuda._cached_device_count = visible
        torch.cuda.init()
    # The launcher has asked the driver's library, which counts whole GPUs.
    visible = torch.cuda.device_count()
    if index >= visible:
        raise _fewer_gpus(gpus, visible)
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    if wants_cuda_sanitizer():
        _enable_sanitizer()
    return device


def _fewer_gpus(counted: int, visible: int) -> UsageError:
    return UsageError(
        f"the driver counts {counted} GPUs and CUDA shows {visible} of them: of GPUs that are "
        f"split into slices (MIG) a process sees one. Say --workers {visible}; or list a slice "
        "for each worker, CUDA_VISIBLE_DEVICES=MIG-...,MIG-... (nvidia-smi -L names them)"
    )


def _enable_sanitizer() -> None:
    """Do what torch does while it is imported: the fork server must not, but its workers."""
    from torch.cuda._sanitizer import cuda_sanitizer

    if not cuda_sanitizer.enabled:
        cuda_sanitizer.enable()


def device_index(options: DistOptions, placement: Placement, gpus: int) -> int:
    """Number this worker's GPU among those that it sees.

    Slurm and MPI may show each worker a GPU of its own (`srun --gpus-per-task=1`): it is then the
    only one. Over Gloo more workers than GPUs share them, in turn; NCCL lets each GPU take part
    once.

    Raises:
        UsageError: There are fewer GPUs than workers, or nobody says which one to take.
    """
    by_hand = placement.source == "options" and placement.world_size > 1
    if by_hand and options.local_rank is None and gpus > 1:
        raise UsageError(
            f"{gpus} GPUs are here: give each worker its own by --local-rank, from 0 on each node"
        )
    # Such launchers may show each worker its own GPU alone, which then is number 0.
    if placement.source in _MAY_SHOW_ONE_GPU and gpus == 1:
        return 0
    if placement.local_rank >= gpus and not options.shares_gpus:
        raise UsageError(
            f"{placement.local_world_size} workers on this node need as many GPUs, "
            f"and there are {gpus}. Ask for --workers {gpus}, or use --device cpu; or let them "
            "share GPUs: --device cuda --backend gloo"
        )
    return placement.local_rank % gpus


def use_device(device: torch.device) -> None:
    """Set a thread's device to the worker's: new threads start with the machine's first one.

    Leaving a block on a stream would otherwise take that up as well, and memory on it. A device
    without a number (`cuda`) is whichever the thread has.
    """
    if is_accelerator(device) and device.index is not None:
        torch.accelerator.set_device_index(device)


def resolve_backend(options: DistOptions, device: torch.device) -> str:
    """Name the backend of the gradients: nccl between GPUs, gloo between CPU workers."""
    if options.backend != "auto":
        return options.backend
    return features(device).backend


def is_accelerator(device: torch.device) -> bool:
    """Tell whether a device computes asynchronously to the host: all but CPUs do."""
    return device.type != "cpu"


def kinds_here() -> tuple[str, ...]:
    """Name the kinds of device that this build of torch is for, whether or not there are any."""
    accelerator = torch.accelerator.current_accelerator()
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def begun_kind() -> str | None:
    """Name the kind of GPU that this process uses already, so that it can't be forked any more.

    None also with Metal, which tells a fork alone.
    """
    for kind in kinds_here():
        if kind not in ("cpu", "mps") and torch.get_device_module(kind).is_initialized():
            return kind
    return None


def default_generator(device: torch.device) -> torch.Generator:
    """Give the generator that a model on an accelerator draws from; the device is started."""
    if device.type == "mps":
        return torch.mps._get_default_mps_generator()
    kind = torch.get_device_module(device)
    kind.init()
    generator: torch.Generator = kind.default_generators[device.index or 0]
    return generator


def can_pin(device: torch.device) -> bool:
    """Tell whether copies from pinned host memory to a device are asynchronous."""
    return features(device).copies_beside


def free_bytes(device: torch.device) -> int:
    """Give the free bytes for tensors on a device; 0 if unknown."""
    try:
        free, _ = torch.accelerator.get_memory_info(device)
        reserved = torch.accelerator.memory_reserved(device)
        return free + reserved - torch.accelerator.memory_allocated(device)
    except (RuntimeError, NotImplementedError, AttributeError):  # no such figures for this device
        return 0


def has_cudnn(device: torch.device) -> bool:
    """Tell whether convolutions go through cuDNN, or ROCm's MIOpen in its place."""
    return device.type == "cuda"


def has_batchnorm_kernels(device: torch.device) -> bool:
    """Tell whether torch has kernels for BatchNorm over several workers (`batch_norm_stats` …)."""
    return device.type == "cuda"


def widest_float(device: torch.device) -> torch.dtype:
    """Give the type for what must lose no digits on a device: float64, where it has that.

    Apple's GPUs don't, nor do some of Intel's: float32 has to do there.
    """
    if device.type == "xpu":
        has_float64 = bool(torch.xpu.get_device_properties(device).has_fp64)
        return torch.float64 if has_float64 else torch.float32
    return torch.float64 if features(device).has_float64 else torch.float32


def has_bf16(device: torch.device) -> bool:
    """Tell whether a GPU multiplies bf16 numbers in hardware."""
    if not features(device).reports_bf16:
        return False
    return bool(torch.get_device_module(device).is_bf16_supported(including_emulation=False))


def describe_device(device: torch.device) -> str:
    """Name the hardware for `run.json`, for example `NVIDIA H200` or `CPU (x86_64, AVX512)`."""
    if device.type == "mps":
        return f"{torch.backends.mps.get_name()} (MPS)"
    if is_accelerator(device):
        name: str = torch.get_device_module(device).get_device_name(device)
        return name
    return f"CPU ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"


def cpu_name() -> str:
    """Name the processor, for `run.json`."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def pci_address(device: torch.device) -> str | None:
    """Name a GPU's place on the PCI bus, such as `0000:41:00.0`; None where torch doesn't tell."""
    if device.type != "cuda":
        return None
    gpu: Any = torch.cuda.get_device_properties(device)  # torch's stub lacks these fields
    return f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
