import os

import pytest
import torch

from paceline.distributed.cpu_threads import share_cores, threads_of_share
from paceline.distributed.group import Group
from tests.support.ranks import run_ranks

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


@pytest.mark.parametrize(("cores", "sharing", "threads"), [(8, 2, 4), (8, 3, 2), (1, 4, 1)])
def test_a_share(cores: int, sharing: int, threads: int) -> None:
    assert threads_of_share(cores, sharing) == threads


@pytest.mark.ranks
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores that can be chosen")
@pytest.mark.parametrize("case", ["shared", "bound", "set"])
def test_cores_are_shared(case: str) -> None:
    """Three workers on two cores: all on both, or rank 0 bound to one and the others to both."""

    def body(group: Group) -> int:
        os.environ.pop("OMP_NUM_THREADS", None)
        os.sched_setaffinity(0, CORES[:2])
        torch.set_num_threads(7)
        if case == "set":
            os.environ["OMP_NUM_THREADS"] = "7"
        if case == "bound" and group.rank > 0:
            os.sched_setaffinity(0, CORES[:1])
        share_cores(group)
        return torch.get_num_threads()

    expected = {"shared": [1, 1, 1], "bound": [2, 1, 1], "set": [7, 7, 7]}
    assert run_ranks(3, body) == expected[case]


def test_one_worker_keeps_its_threads() -> None:
    def body(group: Group) -> int:
        torch.set_num_threads(3)
        share_cores(group)
        return torch.get_num_threads()

    assert run_ranks(1, body) == [3]
