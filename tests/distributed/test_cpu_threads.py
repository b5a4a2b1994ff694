import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from paceline.distributed import cpu_threads
from paceline.distributed.cpu_threads import (
    NumaAffinity,
    bind_near_gpu,
    bind_to,
    describe_cores,
    may_bind,
    share_cores,
    threads_of_share,
)
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


HALVES = [({0, 1, 2, 3}, {0, 1}), ({0, 1, 2, 3}, {2, 3})]


@pytest.mark.parametrize(
    ("workers", "may"),
    [
        (HALVES, True),
        (HALVES * 2, True),
        (HALVES[:1], False),  # cores 2 and 3 would be left unused
        (HALVES[:1] * 2, False),
        ([({0, 1}, {0, 1}), ({2, 3}, {2, 3})], True),  # bound already, by srun
        ([*HALVES, ({0, 1, 2, 3}, set())], False),  # one GPU's node isn't known
    ],
)
def test_when_workers_are_kept_near_their_gpus(
    workers: list[tuple[set[int], set[int]]], may: bool
) -> None:
    assert may_bind(workers, always=False) is may
    assert may_bind(workers, always=True)


@pytest.mark.ranks
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores that can be chosen")
@pytest.mark.parametrize("case", ["near", "one node", "on", "off", "elsewhere"])
def test_workers_are_bound_near_their_gpus(case: str) -> None:
    """Two workers on two cores, each with a GPU beside one of them; or both beside the first."""

    def body(group: Group) -> list[int]:
        os.sched_setaffinity(0, CORES[:2])
        core = {"one node": CORES[0], "on": CORES[0], "elsewhere": 9999}.get(
            case, CORES[group.rank]
        )
        wanted: NumaAffinity = "off" if case == "off" else "on" if case == "on" else "auto"
        bind_to(group, frozenset({core, 9998}), wanted)
        return sorted(os.sched_getaffinity(0))

    first, second = CORES[:1], CORES[1:2]
    expected = {"near": [first, second], "on": [first, first]}
    assert run_ranks(2, body) == expected.get(case, [CORES[:2], CORES[:2]])


def test_workers_without_gpus_stay_where_they_are() -> None:
    group = cast(Group, SimpleNamespace(device=torch.device("cpu")))  # has no collective to call
    bind_near_gpu(group, "on")
    assert describe_cores(torch.device("cpu")) == ""


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores that can be chosen")
def test_the_cores_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device, found = torch.device("cuda", 0), tmp_path / "0000:41:00.0"
    found.mkdir()
    (found / "numa_node").write_text("1\n")
    (found / "local_cpulist").write_text(f"{CORES[0]},{CORES[0] + 7000}-{CORES[0] + 7001}\n")
    monkeypatch.setattr(cpu_threads, "pci_address", lambda device: found.name)
    assert describe_cores(device, tmp_path) == ""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES[:1])
    try:
        assert describe_cores(device, tmp_path) == f"{CORES[0]}, near its GPU"
    finally:
        os.sched_setaffinity(0, before)
