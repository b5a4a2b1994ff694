"""Assigns CPU cores (near a worker's GPU) and threads to the workers of a node."""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import torch

from paceline.distributed.device import is_accelerator, pci_address
from paceline.distributed.environment import threads_are_set
from paceline.distributed.group import Group
from paceline.distributed.rendezvous import this_node
from paceline.distributed.system_gpus import PCI_DEVICES, near_cores, show_cores

NumaAffinity = Literal["auto", "on", "off"]


def bind_near_gpu(group: Group, wanted: NumaAffinity) -> None:
    """Keep this worker, and the processes that it starts, on the cores of its GPU's NUMA node.

    Collective, where workers have GPUs. Linux alone tells and does it. Never adds a core to those
    that srun, mpirun or taskset have left.

    Args:
        wanted: `auto`: only where all workers of a node together keep all of their cores; `on`:
            also where some are left unused then; `off`: not at all.
    """
    if is_accelerator(group.device) and hasattr(os, "sched_setaffinity"):
        address = pci_address(group.device)
        bind_to(group, frozenset() if address is None else near_cores(address), wanted)


def bind_to(group: Group, near: frozenset[int], wanted: NumaAffinity) -> None:
    """Keep this worker on these cores, as `bind_near_gpu` says. Collective, on Linux.

    Args:
        near: None where they aren't known.
    """
    own = os.sched_getaffinity(0)
    record = json.dumps([this_node(), sorted(own), sorted(near & own)])
    others = [json.loads(text) for text in group.gather_texts(record)]
    node = [(set(cores), set(close)) for name, cores, close in others if name == this_node()]
    if wanted != "off" and may_bind(node, always=wanted == "on") and near & own:
        for thread in Path("/proc/self/task").iterdir():  # new ones do as who starts them
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), near & own)


def may_bind(workers: Sequence[tuple[set[int], set[int]]], *, always: bool) -> bool:
    """Tell whether the workers of a node may be kept on the cores near their GPUs. Pure.

    Args:
        workers: Of each, the cores that it has, and those of them near its GPU.
        always: Also where cores are left unused then, which loader processes might have used.
    """
    if always:
        return True
    had: set[int] = set().union(*(own for own, _ in workers))
    kept: set[int] = set().union(*(near for _, near in workers))
    return all(near for _, near in workers) and kept == had


def describe_cores(device: torch.device, devices: Path = PCI_DEVICES) -> str:
    """Name the cores of a worker that is bound near its GPU, by us or by others; else nothing.

    Args:
        devices: Where the system has a directory for each address.
    """
    address = pci_address(device)
    near = frozenset() if address is None else near_cores(address, devices)
    own = _own_cores()
    is_bound = near.issuperset(own) and len(own) < (os.cpu_count() or 1)
    return f"{show_cores(own)}, near its GPU" if is_bound else ""


def share_cores(group: Group) -> None:
    """Share the cores of a node between its workers, unless OMP_NUM_THREADS is set. Collective.

    PyTorch takes all cores in every process: two workers on two cores are then many times slower.
    Workers that were bound to cores of their own (by srun, by mpirun) keep all of these.
    """
    cores = _own_cores()
    text = f"{this_node()} {cores}"
    own = hashlib.sha256(text.encode()).hexdigest()
    sharing = group.gather_texts(own).count(own)
    if group.world_size > 1 and not threads_are_set():
        torch.set_num_threads(threads_of_share(len(cores), sharing))


def threads_of_share(cores: int, sharing: int) -> int:
    """Give the threads of one of `sharing` workers on the same cores: at least 1."""
    return max(1, cores // sharing)


def _own_cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
