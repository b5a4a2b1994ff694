"""Lists this machine's GPUs by the operating system, without torch or vendor packages."""

import ctypes
import platform
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from pathlib import Path

_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
_OF_KERNEL = Path("/sys/module/amdgpu")
PCI_DEVICES = Path("/sys/bus/pci/devices")
"""Where Linux has a directory for each device, by its address."""
_NVML = "libnvidia-ml.so.1"
"""A part of NVIDIA's driver."""


@cache
def may_have_gpus() -> bool:
    """Tell whether this machine could have NVIDIA's or AMD's GPUs; False is certain.

    Launchers and workers ask alike: what the one counts the others use. Containers may have the
    driver's library without its device files (Jetson, gVisor).
    """
    if sys.platform not in ("linux", "darwin"):
        return True
    return any(Path(device).exists() for device in _DEVICES) or _has_nvml()


def _has_nvml() -> bool:
    try:
        ctypes.CDLL(_NVML)
    except OSError:
        return False
    return True


def driver_version(files: Sequence[Path] = _DRIVERS, of_kernel: Path = _OF_KERNEL) -> str | None:
    """Read the version of the GPUs' driver; None where the system doesn't tell it.

    Args:
        files: In which NVIDIA's and AMD's kernel modules have theirs.
        of_kernel: Is there where AMD's module is: the one that comes with Linux has no other
            version than the kernel's.
    """
    for file in files:
        try:
            words = file.read_text().partition("\n")[0].split()
        except OSError:
            continue
        for word in words:
            if word[0].isdigit() and "." in word and word.replace(".", "").isdigit():
                return word
    return f"amdgpu of Linux {platform.release()}" if of_kernel.is_dir() else None


def read_utilization(
    address: str, devices: Path = PCI_DEVICES, library: str = _NVML
) -> Callable[[], float | None] | None:
    """Give what reads the share of the last second or less in which a GPU computed anything.

    Args:
        address: The GPU's on the PCI bus, such as `0000:41:00.0`.
        devices: Where the system has a directory for each address; AMD's driver tells it there.
        library: NVIDIA's management library, which tells it as well.

    Returns:
        A function that gives it, None where it can't be read just now; None where nobody tells it.
    """
    busy = devices / address / "gpu_busy_percent"
    if busy.is_file():
        return partial(_percent_in, busy)
    handle, rates = ctypes.c_void_p(), (ctypes.c_uint * 2)()  # of the GPU, and of its memory
    try:
        nvml = ctypes.CDLL(library)
        query = nvml.nvmlDeviceGetUtilizationRates
        name = address.encode()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByPciBusId_v2(name, ctypes.byref(handle)):
            return None
    except (OSError, AttributeError):  # no such driver, or a very old one
        return None
    return lambda: None if query(handle, rates) else rates[0] / 100


def _percent_in(file: Path) -> float | None:
    try:
        return int(file.read_text()) / 100
    except (OSError, ValueError):
        return None


def near_cores(address: str, devices: Path = PCI_DEVICES) -> frozenset[int]:
    """List the CPU cores of the GPU's own NUMA node; none where the system doesn't tell.

    Args:
        address: The GPU's on the PCI bus.
        devices: Where the system has a directory for each address.
    """
    try:
        node = int((devices / address / "numa_node").read_text())
        listed = (devices / address / "local_cpulist").read_text()
        return frozenset() if node < 0 else read_cores(listed)
    except (OSError, ValueError):
        return frozenset()


def read_cores(listed: str) -> frozenset[int]:
    """Read a list of cores as Linux writes it, such as `0-31,64-95`.

    Raises:
        ValueError: It isn't one.
    """
    cores: set[int] = set()
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)


def show_cores(cores: Iterable[int]) -> str:
    """Write cores as Linux lists them: `0-31,64-95`."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in parts)
