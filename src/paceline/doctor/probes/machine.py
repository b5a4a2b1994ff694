"""Processors, memory, GPUs and limits of this host, and who else uses them."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import psutil

from paceline.distributed.device import cpu_name
from paceline.doctor.facts import GpuFacts, LimitFacts, MachineFacts
from paceline.launch.local.oom import control_groups
from paceline.launch.worker_count import usable_cores

_UNLIMITED = 1 << 60
"""cgroup v1 writes a number near 2^63 where there is no limit."""


@dataclass(frozen=True, kw_only=True)
class CgroupLimits:
    """The narrowest limits of a control group and those that it is in; None: no limit."""

    cores: float | None
    memory_bytes: int | None


def cgroup_limits(
    proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> CgroupLimits:
    """Read this process's limits."""
    groups = control_groups(("cpu", "memory"), proc, root)
    cores = [limit for group in groups if (limit := _cores(group)) is not None]
    memory = [limit for group in groups if (limit := _memory(group)) is not None]
    return CgroupLimits(
        cores=min(cores, default=None),
        memory_bytes=min(memory, default=None),
    )


def _cores(group: Path) -> float | None:
    words = _words(group / "cpu.max")
    if not words:
        # Control groups of version 1.
        quota, period = _words(group / "cpu.cfs_quota_us"), _words(group / "cpu.cfs_period_us")
        words = quota + period
    if len(words) != 2 or not words[0].isdecimal() or not int(words[1]):
        return None  # `max` in v2, -1 in v1
    return int(words[0]) / int(words[1])


def _memory(group: Path) -> int | None:
    words = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
    if not words or not words[0].isdecimal() or int(words[0]) >= _UNLIMITED:
        return None
    return int(words[0])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


_WATCHED_S = 1.0
_SHOWN = 3
_BUSY_PERCENT = 20.0
_RDMA = Path("/sys/class/infiniband")
_SHARED = Path("/dev/shm")


def machine_facts() -> MachineFacts:
    """Look at this machine for a second. Call it before anything else makes it busy."""
    busy_cores, steal, busiest = _watched()
    memory, allowed = psutil.virtual_memory(), cgroup_limits()
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
    """Measure the load for a second.

    Returns:
        Busy cores, the share that the hypervisor took, and the busiest processes.
    """
    # The first call of cpu_percent sets the start of its interval.
    processes = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            process.cpu_percent()
            processes.append(process)
    before = psutil.cpu_times()
    time.sleep(_WATCHED_S)  # what is measured is this second, not a condition
    after = psutil.cpu_times()
    # Linux counts guest time within user time: adding it would count it twice.
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
    # The first eight fields, without guest and guest_nice.
    total_s = sum(after[:8]) - sum(before[:8])
    shown = tuple(text for _, text in sorted(busiest, reverse=True)[:_SHOWN])
    share = max(0.0, steal / total_s) if "steal" in after._fields and total_s > 0 else None
    return max(0.0, busy / _WATCHED_S), share, shown


def _steal_s(times: object) -> float:
    """Time that the hypervisor gave to others; Linux alone tells."""
    return float(getattr(times, "steal", 0.0))


_ELEMENTS = 1 << 20
_STEP = 2654435761
"""Knuth's multiplier: neighbours differ in all bytes, so that pieces in wrong places show."""


def gpu_facts() -> GpuFacts:
    """Count the GPUs, and copy data between all of them. Claims a little memory on each."""
    import torch

    from paceline.distributed.device import describe_device, features

    try:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is None or not features(accelerator).counts_memory:
            return GpuFacts()
        devices = [f"{accelerator.type}:{i}" for i in range(torch.accelerator.device_count())]
        memory = [torch.accelerator.get_memory_info(device) for device in devices]
        return GpuFacts(
            kind=accelerator.type,
            names=tuple(describe_device(torch.device(device)) for device in devices),
            memory_bytes=tuple(int(total) for _, total in memory),
            free_bytes=tuple(int(free) for free, _ in memory),
            wrong_copies=tuple(wrong_copies(devices)),
        )
    except RuntimeError as error:
        return GpuFacts(problem=str(error).splitlines()[0])


def wrong_copies(devices: Sequence[str]) -> Iterator[str]:
    """Copy a pattern from each device to each, and name the links on which it was damaged.

    Some machines return zeros or old data from copies between GPUs (where the IOMMU or PCI access
    control is in the way) and report no error.
    """
    import torch

    # (_ELEMENTS,) of int64
    pattern = torch.arange(_ELEMENTS, dtype=torch.int64) * _STEP
    for source, target in product(devices, repeat=2):
        sent = pattern.to(source, copy=True)
        arrived = torch.zeros_like(pattern, device=target)
        arrived.copy_(sent)
        if not torch.equal(arrived.cpu(), pattern):
            yield f"{source} to {target}"
