"""How many workers a machine gets, and how many threads each of them."""

import os
import sys
from pathlib import Path

from paceline.config.quantities import parse_count
from paceline.errors import UsageError

_DEFAULT_CPU_WORKERS = 2
_GPU_BACKENDS = ("nccl", "xccl", "smddp")


def usable_cores() -> int:
    """Count the CPU cores that this process may use (its affinity, not the machine's total)."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_workers(asked: int | None, gpus: int, cores: int, backend: str) -> int:
    """Choose the number of workers for one machine.

    Args:
        asked: The user's number, or None.
        gpus: GPUs that can be used here.
        cores: CPU cores that can be used here.
        backend: `auto`; `nccl`, `xccl` or `smddp` (GPU workers); `gloo` (CPU workers).

    Raises:
        UsageError: There aren't enough GPUs for what was asked.
    """
    if asked is not None and asked < 1:
        raise UsageError(f"--workers is {asked}; it must be at least 1")
    if backend in _GPU_BACKENDS or (backend == "auto" and gpus > 0):
        return _gpu_workers(asked, gpus, backend)
    return _cpu_workers(asked, cores)


def threads_per_worker(
    asked: int | None, workers: int, cores: int, omp_num_threads: str | None = None
) -> int:
    """Choose the CPU threads of each worker.

    Args:
        asked: The user's number, or None.
        workers: Workers on this machine.
        cores: CPU cores that can be used here.
        omp_num_threads: The user's OMP_NUM_THREADS, which counts where nothing was asked.

    Raises:
        UsageError: The number asked for is below 1, or OMP_NUM_THREADS isn't a number.
    """
    if asked is not None:
        if asked < 1:
            raise UsageError(f"--threads is {asked}; it must be at least 1")
        if asked > cores:
            raise UsageError(
                f"--threads is {asked}, but there {_are(cores, 'CPU core')} here: "
                f"more of them only slow a training down. Give at most {cores}"
            )
        return asked
    if omp_num_threads:
        first = omp_num_threads.split(",")[0].strip()  # a list gives one number per nesting level
        number = parse_count(first)
        if not number:
            raise UsageError(
                f"OMP_NUM_THREADS is {omp_num_threads!r}, not a number of threads. "
                "Unset it or say --threads"
            )
        return number
    return max(1, cores // workers)


def _gpu_workers(asked: int | None, gpus: int, backend: str) -> int:
    if gpus == 0:
        raise UsageError(
            f"--backend {backend} needs GPUs and there is none here. "
            "Say --backend gloo to train on the CPU"
        )
    if asked is not None and asked > gpus:
        raise UsageError(
            f"--workers {asked}, but there {_are(gpus, 'GPU')} here (one worker uses one). "
            f"Say --workers {gpus}, or --backend gloo to train on the CPU"
        )
    return asked or gpus


def _cpu_workers(asked: int | None, cores: int) -> int:
    """More than cores is allowed where it is asked for: slower, and good for trying things out."""
    return asked or min(_DEFAULT_CPU_WORKERS, cores)


def _are(count: int, noun: str) -> str:
    return f"is 1 {noun}" if count == 1 else f"are {count} {noun}s"


def may_have_gpus() -> bool:
    """Tell without importing torch whether this machine could have GPUs; False is certain."""
    drivers = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")
    return sys.platform not in ("linux", "darwin") or any(
        Path(driver).exists() for driver in drivers
    )
