import pytest
import torch

from paceline.distributed import device
from paceline.distributed.device import (
    cpu_name,
    describe_device,
    device_index,
    pick_device,
    resolve_backend,
    resolve_device_kind,
)
from paceline.distributed.environment import Placement
from paceline.distributed.options import DistOptions
from paceline.distributed.placement import Source
from paceline.errors import UsageError

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("options", "gpus", "kind"),
    [
        (DistOptions(), 0, "cpu"),
        (DistOptions(), 2, "cuda"),
        (DistOptions(device="cpu"), 2, "cpu"),
        (DistOptions(device="cuda"), 1, "cuda"),
        (DistOptions(backend="gloo"), 2, "cpu"),
        (DistOptions(backend="gloo", device="cuda"), 2, "cuda"),
        (DistOptions(backend="nccl"), 1, "cuda"),
        (DistOptions(backend="smddp"), 1, "cuda"),
        (DistOptions(backend="smddp", device="cpu"), 0, "cpu"),
        (DistOptions(backend="mpi"), 2, "cpu"),
        (DistOptions(backend="mpi", device="cuda"), 2, "cuda"),
    ],
)
def test_kind_of_device(options: DistOptions, gpus: int, kind: str) -> None:
    assert resolve_device_kind(options, gpus) == kind


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        (DistOptions(device="cuda"), "--device cuda"),
        (DistOptions(backend="nccl"), "--backend nccl"),
        (DistOptions(backend="smddp"), "--backend smddp"),
    ],
)
def test_a_gpu_that_isnt_there(options: DistOptions, asked: str) -> None:
    with pytest.raises(UsageError, match=f"{asked} needs a GPU.*Use --device cpu"):
        resolve_device_kind(options, 0)


def test_more_workers_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "gpu_count", lambda: 1)
    placement = Placement(rank=1, world_size=2, local_rank=1, local_world_size=2)
    with pytest.raises(UsageError, match=r"2 workers .* there are 1\. Ask for --workers 1"):
        pick_device(DistOptions(device="cuda"), placement)


def test_over_gloo_workers_share_gpus() -> None:
    sharing = DistOptions(device="cuda", backend="gloo")
    for local_rank, index in enumerate((0, 1, 0, 1)):
        placement = Placement(rank=0, world_size=4, local_rank=local_rank, local_world_size=4)
        assert device_index(sharing, placement, 2) == index


def test_intel_gpus_are_used_where_they_are_asked_for() -> None:
    for options in (DistOptions(device="xpu"), DistOptions(backend="xccl")):
        assert resolve_device_kind(options, 0, xpus=1) == "xpu"
        with pytest.raises(UsageError, match="needs an Intel GPU"):
            resolve_device_kind(options, 1)
    assert resolve_device_kind(DistOptions(), 0, xpus=1) == "cpu"


@pytest.mark.parametrize(
    ("source", "gpus", "index"),
    [("slurm", 4, 3), ("slurm", 1, 0), ("openmpi", 1, 0), ("torch", 4, 3), ("options", 4, 3)],
)
def test_which_gpu(source: Source, gpus: int, index: int) -> None:
    placement = Placement(rank=3, world_size=4, local_rank=3, local_world_size=4, source=source)
    by_hand = DistOptions(rank=3, world_size=4, local_rank=3)
    options = by_hand if source == "options" else DistOptions()
    assert device_index(options, placement, gpus) == index


def test_a_gpu_that_nobody_picked() -> None:
    options = DistOptions(rank=1, world_size=2)
    placement = Placement(rank=1, world_size=2, source="options", settled=False)
    assert device_index(options, placement, 1) == 0
    with pytest.raises(UsageError, match=r"2 GPUs are here: .* by --local-rank"):
        device_index(options, placement, 2)


def test_backends() -> None:
    assert resolve_backend(DistOptions(), torch.device("xpu", 0)) == "xccl"
    assert resolve_backend(DistOptions(), CPU) == "gloo"
    assert resolve_backend(DistOptions(), torch.device("cuda", 0)) == "nccl"
    assert resolve_backend(DistOptions(backend="gloo"), torch.device("cuda", 0)) == "gloo"


def test_the_cpu_has_a_name() -> None:
    assert pick_device(DistOptions(device="cpu"), Placement()) == CPU
    assert describe_device(CPU).startswith("CPU (")
    assert cpu_name()
