"""Processors, memory, limits and disk of one host."""

from collections.abc import Iterator
from dataclasses import dataclass

from paceline.doctor.check_result import CheckResult, fault, ok, warning
from paceline.doctor.facts import DiskFacts, HostFacts, LimitFacts, MachineFacts
from paceline.options.figures import plural, show_bytes, show_whole_percent

GB = 10**9
_FAULTY_STEAL, _MUCH_STEAL, _SOME_STEAL = 0.5, 0.1, 0.02
_BUSY_SHARE = 0.2
_WORKER_BYTES = 1 * GB
"""What a worker needs beside its model and data: torch and its libraries are 0.6 GB."""
_LOADER_SHARED_BYTES = 64 << 20
"""/dev/shm that one loader process fills with the batches it has ready: some of 224 x 224."""
_FEW_BYTES, _NO_BYTES = 10 * GB, GB // 2
_SLOW_DISK_PER_S = 30e6
_FILES, _FILES_PER_LOADER, _FILES_PER_PEER = 256, 64, 4


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What the training would have on one host."""

    workers: int = 1
    on_gpus: bool = False
    loader_workers: int = 2
    """Of each worker, for training samples; as many again for validation."""
    world_size: int = 1
    """Workers of all hosts."""
    has_recipe: bool = False
    """Whether a certain training is meant: it needs its working directory."""


def workers_on(facts: HostFacts, slots: int | None, on_gpus: bool) -> tuple[int, bool]:
    """Say how many workers a host gets, and whether they are to use GPUs.

    Args:
        on_gpus: Whether GPUs are to be used where there are any.
    """
    gpus = len(facts.gpus.names) if on_gpus else 0
    usual = gpus or min(2, facts.machine.cores)
    return (slots or usual), gpus > 0


def check_machine(host: str, facts: HostFacts, required: Requirements) -> Iterator[CheckResult]:
    """Check all that concerns one host alone, but its GPUs."""
    for part, why in facts.unknown.items():
        yield warning(host, part, f"couldn't be examined: {why}")
    if "machine" not in facts.unknown:
        yield from _cores(host, facts.machine, required)
        yield from _load(host, facts.machine)
        yield from _memory(host, facts.machine, required)
    if "limits" not in facts.unknown:
        yield from _limits(host, facts.limits, required)
    if "disk" not in facts.unknown:
        yield from _directory(host, facts.disk, required)
        yield from _disk(host, facts.disk)


def _cores(host: str, machine: MachineFacts, required: Requirements) -> Iterator[CheckResult]:
    quota, cores = machine.quota_cores, machine.cores
    if quota is not None and quota < min(cores, required.workers):
        yield warning(
            host,
            "cores",
            f"the control group allows {quota:g} of {plural(cores, 'core')} on average, for "
            f"{plural(required.workers, 'worker')}: raise it (docker --cpus, Kubernetes "
            "limits.cpu)",
        )
    elif not required.on_gpus and required.workers > cores:
        yield warning(
            host,
            "cores",
            f"{plural(required.workers, 'worker')} share {plural(cores, 'core')}: expect no gain "
            f"in speed. Give the host {plural(cores, 'worker')}",
        )
    else:
        limit = f", a quota of {quota:g}" if quota is not None else ""
        text = f"{plural(cores, 'core')}{limit} for {plural(required.workers, 'worker')}"
        yield ok(host, "cores", text)


def _load(host: str, machine: MachineFacts) -> Iterator[CheckResult]:
    steal = machine.steal_share
    if steal is not None and steal >= _SOME_STEAL:
        state = fault if steal >= _FAULTY_STEAL else warning
        much = "much" if steal >= _MUCH_STEAL else "some"
        yield state(
            host,
            "steal",
            f"the hypervisor gives {much} of this machine's time to others "
            f"({show_whole_percent(steal)} in a "
            "second): it will be slower than the other hosts. Stop and start it, so that it moves "
            "elsewhere, or take a type that doesn't share its cores",
        )
    elif steal is not None:
        yield ok(host, "steal", "no time is taken by the hypervisor")
    if machine.busy_cores > max(1.0, _BUSY_SHARE * machine.cores):
        who = f": {', '.join(machine.busiest)}" if machine.busiest else ""
        yield warning(
            host,
            "load",
            f"{machine.busy_cores:.1f} cores are busy with something else{who}. All hosts wait "
            "for the slowest in every step: end it, or train later",
        )
    else:
        yield ok(host, "load", "idle")


def _memory(host: str, machine: MachineFacts, required: Requirements) -> Iterator[CheckResult]:
    limit = machine.limit_bytes
    usable = min(machine.available_bytes, limit or machine.available_bytes)
    needed = required.workers * _WORKER_BYTES
    of = f"{show_bytes(usable)} of {show_bytes(machine.memory_bytes)}"
    of += f", and the control group allows {show_bytes(limit)}" if limit is not None else ""
    if usable < needed:
        yield warning(
            host,
            "memory",
            f"{of} are free, and {plural(required.workers, 'worker')} need {show_bytes(needed)} "
            "before any model: fewer workers, or raise the limit (docker --memory, limits.memory)",
        )
    elif machine.swap_used_bytes > GB and machine.available_bytes < 0.2 * machine.memory_bytes:
        yield warning(
            host,
            "memory",
            f"{of} are free and {show_bytes(machine.swap_used_bytes)} are swapped out: what is "
            "swapped in again makes steps many times slower. End what uses the memory",
        )
    else:
        yield ok(host, "memory", f"{show_bytes(machine.memory_bytes)}, enough of it free")


def _limits(host: str, limits: LimitFacts, required: Requirements) -> Iterator[CheckResult]:
    yield _shared_memory(host, limits, required)
    files = (
        _FILES + _FILES_PER_LOADER * required.loader_workers + _FILES_PER_PEER * required.world_size
    )
    if limits.open_files is not None and limits.open_files < files:
        yield warning(
            host,
            "open files",
            f"a process may open {limits.open_files:,}, and a worker may need {files:,}: "
            "ulimit -n 65536 (LimitNOFILE= of a service, nofile in limits.conf)",
        )
    else:
        yield ok(host, "open files", "enough may be open at once")
    # RDMA registers memory, which counts as locked.
    locked = limits.locked_bytes
    if limits.rdma_devices and locked is not None and locked < GB:
        yield fault(
            host,
            "locked memory",
            f"{', '.join(limits.rdma_devices)} need memory that stays in place, and only "
            f"{show_bytes(locked)} are allowed: ulimit -l unlimited (memlock in limits.conf, "
            "docker --ulimit memlock=-1), and a new login",
        )
    elif limits.rdma_devices:
        yield ok(host, "locked memory", f"enough for {', '.join(limits.rdma_devices)}")


def _shared_memory(host: str, limits: LimitFacts, required: Requirements) -> CheckResult:
    size = limits.shared_memory_bytes
    # In an evaluation both have batches ready: those for training read the next epoch's first ones.
    loaders = 2 * required.workers * required.loader_workers
    if size is None:
        return ok(host, "/dev/shm", "none on this system")
    needed = loaders * _LOADER_SHARED_BYTES
    if size < needed or (required.on_gpus and required.workers > 1 and size < GB):
        return warning(
            host,
            "/dev/shm",
            f"{show_bytes(size)}: loader processes pass batches through it, {loaders} of them may "
            f"fill {show_bytes(needed)}, and NCCL uses it between GPUs (`Bus error` when it is "
            "full). docker --shm-size=8g, in Kubernetes an emptyDir of medium Memory, or "
            "--loader-workers 0",
        )
    return ok(host, "/dev/shm", "large enough")


def _directory(host: str, disk: DiskFacts, required: Requirements) -> Iterator[CheckResult]:
    if disk.missing:
        state = fault if required.has_recipe else warning
        text = f"there is no {disk.missing}. Name one by dir= in the hostfile, or say --sync-code"
        yield state(host, "directory", text)


def _disk(host: str, disk: DiskFacts) -> Iterator[CheckResult]:
    where, free = disk.directory, show_bytes(disk.free_bytes)
    if disk.problem:
        yield fault(
            host,
            "disk",
            f"{where} can't be written: {disk.problem}. Name a place that can, by --run-dir",
        )
    elif disk.free_bytes < _NO_BYTES:
        yield fault(host, "disk", f"{where} has {free} left: no room for snapshots")
    elif disk.free_bytes < _FEW_BYTES:
        yield warning(
            host, "disk", f"{where} has {free} left: several snapshots may not fit (--keep-last)"
        )
    elif disk.write_bytes_per_s is not None and disk.write_bytes_per_s < _SLOW_DISK_PER_S:
        seconds = GB / disk.write_bytes_per_s
        yield warning(
            host,
            "disk",
            f"{where} takes {show_bytes(disk.write_bytes_per_s)}/s: a snapshot of 1 GB needs "
            f"{seconds:.0f} s. Name a faster place by --run-dir, or save less often",
        )
    else:
        yield ok(host, "disk", "room for snapshots, and fast enough")
