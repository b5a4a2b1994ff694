"""How many workers a machine gets, and how many threads each of them."""

import os
import resource

from paceline.errors import UsageError
from paceline.options.quantities import parse_count

MAX_WORKERS = 124
"""Workers of one machine. Torch's elastic agent hands each both ends of every worker's result pipe,
by way of Python's fork server, which adds four descriptors; Linux passes 253 (SCM_MAX_FD)."""
_FILES_PER_WORKER, _FILES = 12, 200
"""Descriptors that a launcher or a worker has open: pipes of all workers, connections to all."""

_DEFAULT_CPU_WORKERS = 2
_GPU_BACKENDS = ("nccl", "xccl", "smddp")


def usable_cores() -> int:
    """Count the CPU cores that this process may use (its affinity, not the machine's total)."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def choose_workers(requested: int | None, gpus: int, cores: int, backend: str) -> int:
    """Choose the number of workers for one machine.

    Args:
        backend: `auto`; `nccl`, `xccl` or `smddp` (GPU workers); `gloo` (CPU workers).

    Raises:
        UsageError: There aren't enough GPUs for what was asked.
    """
    if requested is not None and requested < 1:
        raise UsageError(f"--workers is {requested}; it must be at least 1")
    check_machine(requested or 1)
    if backend in _GPU_BACKENDS or (backend == "auto" and gpus > 0):
        return _gpu_workers(requested, gpus, backend)
    return _cpu_workers(requested, cores)


def check_count(workers: int) -> None:
    """Refuse more workers than any one machine can start.

    Raises:
        UsageError: There are; the message says why, and how many it can.
    """
    if workers > MAX_WORKERS:
        raise UsageError(
            f"--workers {workers} is more than one machine can start: at most {MAX_WORKERS}, "
            "since each is handed the pipes of all, and a process can be handed 253 files. More "
            "workers than CPU cores gain no speed. For more machines give --hosts"
        )


def check_machine(workers: int) -> None:
    """Refuse more workers than this machine can start; raise its limit of open files to that.

    Raises:
        UsageError: There are; the message says why, and how many it can.
    """
    check_count(workers)
    files, most = _files_of(workers), _raised_limit(_files_of(workers))
    if most < files:
        raise UsageError(
            f"--workers {workers} needs about {files} open files in each process, and the limit is "
            f"{most}: raise it (ulimit -Hn {files} as root, or LimitNOFILE= of the service), or "
            f"give at most {max(1, (most - _FILES) // _FILES_PER_WORKER)} workers"
        )


def _files_of(workers: int) -> int:
    return _FILES + _FILES_PER_WORKER * workers


def _raised_limit(needed: int) -> int:
    """Raise this process's limit of open files as far as it may, if need be; children inherit it.

    Returns:
        The limit; `needed` where there is none.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return needed
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if limit > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return limit


def threads_per_worker(
    requested: int | None, workers: int, cores: int, omp_num_threads: str | None = None
) -> int:
    """Choose the CPU threads of each worker.

    Args:
        omp_num_threads: The user's OMP_NUM_THREADS, which counts where nothing was asked.

    Raises:
        UsageError: The number asked for is below 1, or OMP_NUM_THREADS isn't a number.
    """
    if requested is not None:
        if requested < 1:
            raise UsageError(f"--threads is {requested}; it must be at least 1")
        if requested > cores:
            raise UsageError(
                f"--threads is {requested}, but there {_are(cores, 'CPU core')} here: "
                f"more of them only slow a training down. Give at most {cores}"
            )
        return requested
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


def _gpu_workers(requested: int | None, gpus: int, backend: str) -> int:
    if gpus == 0:
        raise UsageError(
            f"--backend {backend} needs GPUs and there is none here. "
            "Say --backend gloo to train on the CPU"
        )
    if requested is not None and requested > gpus:
        raise UsageError(
            f"--workers {requested}, but there {_are(gpus, 'GPU')} here (one worker uses one). "
            f"Say --workers {gpus}, or --backend gloo to train on the CPU; with --device cuda as "
            "well they share the GPUs"
        )
    return requested or gpus


def _cpu_workers(requested: int | None, cores: int) -> int:
    """More than cores is allowed where it is asked for: slower, and good for trying things out."""
    return requested or min(_DEFAULT_CPU_WORKERS, cores)


def _are(count: int, noun: str) -> str:
    return f"is 1 {noun}" if count == 1 else f"are {count} {noun}s"
