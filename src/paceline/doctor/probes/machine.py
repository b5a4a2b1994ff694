"""Processors, memory and limits of this host, and who else uses them."""

import os
import time
from contextlib import suppress
from pathlib import Path

import psutil

from paceline.distributed.device import cpu_name
from paceline.doctor.facts import LimitFacts, MachineFacts
from paceline.doctor.probes.cgroups import allowance
from paceline.launch.worker_count import usable_cores

_WATCHED_S = 1.0
_SHOWN = 3
_BUSY_PERCENT = 20.0
_RDMA = Path("/sys/class/infiniband")
_SHARED = Path("/dev/shm")


def machine_facts() -> MachineFacts:
    """Look at this machine for a second. Call it before anything else makes it busy."""
    busy_cores, steal, busiest = _watched()
    memory, allowed = psutil.virtual_memory(), allowance()
    limit = allowed.memory_bytes
    return MachineFacts(
        processor=cpu_name(),
        cores=usable_cores(),
        quota_cores=allowed.cores,
        steal_share=steal,
        busy_cores=busy_cores,
        busiest=busiest,
        memory_bytes=memory.total,
        available_bytes=memory.available,
        limit_bytes=limit if limit is not None and limit < memory.total else None,
        swap_used_bytes=psutil.swap_memory().used,
    )


def limit_facts() -> LimitFacts:
    """Read what a process may have here."""
    shared = None
    with suppress(OSError):
        if _SHARED.is_dir():
            shared = psutil.disk_usage(str(_SHARED)).total
    return LimitFacts(
        open_files=_limit("RLIMIT_NOFILE"),
        locked_bytes=_limit("RLIMIT_MEMLOCK"),
        rdma_devices=tuple(sorted(p.name for p in _RDMA.iterdir())) if _RDMA.is_dir() else (),
        shared_memory_bytes=shared,
    )


def _limit(name: str) -> int | None:
    import resource

    soft, _ = resource.getrlimit(getattr(resource, name))
    return None if soft == resource.RLIM_INFINITY else soft


def _watched() -> tuple[float, float | None, tuple[str, ...]]:
    """Watch for a second.

    Returns:
        Busy cores, the share that the hypervisor took, and the busiest processes.
    """
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            process.cpu_percent()
            processes.append(process)
    before = psutil.cpu_times()
    time.sleep(_WATCHED_S)  # what is measured is this second, not a condition
    after = psutil.cpu_times()
    busy = sum(
        getattr(after, name) - getattr(before, name)
        for name in after._fields
        if name not in ("idle", "iowait", "guest", "guest_nice", "steal")
    )
    busiest = []
    for process in processes:
        with suppress(psutil.Error):
            percent = process.cpu_percent()
            if percent >= _BUSY_PERCENT and process.pid != os.getpid():
                busiest.append((percent, f"{process.name()} ({process.pid}) {percent:.0f}%"))
    steal = _steal_s(after) - _steal_s(before)
    total_s = sum(after[:8]) - sum(before[:8])
    shown = tuple(text for _, text in sorted(busiest, reverse=True)[:_SHOWN])
    share = max(0.0, steal / total_s) if "steal" in after._fields and total_s > 0 else None
    return max(0.0, busy / _WATCHED_S), share, shown


def _steal_s(times: object) -> float:
    """Time that the hypervisor gave to others; Linux alone tells."""
    return float(getattr(times, "steal", 0.0))
