"""What Linux tells of this machine's GPUs, by files: no torch, and no library of a vendor."""

import platform
from collections.abc import Sequence
from pathlib import Path

_DRIVERS = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
_OF_KERNEL = Path("/sys/module/amdgpu")


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
