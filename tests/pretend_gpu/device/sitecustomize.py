"""Imported by every Python with this directory on its path: what comes with torch and Paceline."""

import ctypes
import os
import sys
import time
from types import ModuleType

from tests.pretend_gpu.device.afterwards import After


def _after_torch(torch: ModuleType) -> None:
    from tests.pretend_gpu.device.arithmetic import install

    install()


def _after_engine(engine: ModuleType) -> None:
    from tests.pretend_gpu.device.steps import note_steps

    note_steps(engine)


if os.environ.get("PRETEND_GPU_CLOCK") == "own":
    _now_ms = ctypes.CDLL(None).pretend_gpu_now_ms
    _now_ms.restype = ctypes.c_double
    time.perf_counter = lambda: _now_ms() / 1000

sys.meta_path.insert(0, After("torch", _after_torch))
sys.meta_path.insert(0, After("paceline.training.engine", _after_engine))
