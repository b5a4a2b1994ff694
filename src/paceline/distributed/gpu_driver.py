"""Whether this machine may have GPUs, asked of their drivers; torch isn't imported for it."""

import ctypes
import sys
from functools import cache
from pathlib import Path

_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
_NVML = "libnvidia-ml.so.1"


@cache
def may_have_gpus() -> bool:
    """Tell whether this machine could have NVIDIA's or AMD's GPUs; False is certain.

    Launchers and workers ask alike: what the one counts the others use. Containers may have the
    driver's library without its device files (Jetson, gVisor).
    """
    if sys.platform not in ("linux", "darwin"):
        return True
    return any(Path(device).exists() for device in _DEVICES) or _has_library(_NVML)


def _has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
