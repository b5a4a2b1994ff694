"""CPU threads of workers that nobody gave a number of threads."""

import hashlib
import os

import torch

from paceline.distributed.environment import threads_are_set
from paceline.distributed.group import Group
from paceline.distributed.rendezvous import this_node


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
