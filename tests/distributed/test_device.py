import pytest
import torch

from paceline.distributed import device
from paceline.distributed.device import (
    begun_kind,
    cpu_name,
    describe_device,
    device_index,
    has_bf16,
    kinds_here,
    pick_device,
    resolve_backend,
    resolve_device_kind,
)
from paceline.distributed.options import DistOptions
from paceline.distributed.placement import Placement, Source
from paceline.errors import UsageError
from paceline.training.rng import generators

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
    assert resolve_device_kind(options, {"cuda": gpus}.__getitem__) == kind


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
        resolve_device_kind(options, lambda _: 0)


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


@pytest.mark.parametrize(
    ("options", "kind", "whose"),
    [
        (DistOptions(device="xpu"), "xpu", "an Intel GPU"),
        (DistOptions(backend="xccl"), "xpu", "an Intel GPU"),
        (DistOptions(device="mps"), "mps", "an Apple GPU"),
    ],
)
def test_other_gpus_are_used_where_they_are_asked_for(
    options: DistOptions, kind: str, whose: str
) -> None:
    assert resolve_device_kind(options, {kind: 1}.__getitem__) == kind
    with pytest.raises(UsageError, match=f"needs {whose}, and this machine has none"):
        resolve_device_kind(options, {"cuda": 1, kind: 0}.__getitem__)
    assert resolve_device_kind(DistOptions(), {"cuda": 0, kind: 1}.__getitem__) == "cpu"


@pytest.fixture
def a_mac(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setattr(torch.mps, "device_count", lambda: 1)
    monkeypatch.setattr(torch.backends.mps, "get_name", lambda: "Apple M4")
    return monkeypatch


@pytest.mark.usefixtures("a_mac")
def test_an_apple_gpu_is_one_workers() -> None:
    asked = DistOptions(device="mps")
    assert (found := pick_device(asked, Placement())) == torch.device("mps", 0)
    assert resolve_backend(asked, found) == "gloo"
    assert describe_device(found) == "Apple M4 (MPS)"
    assert not has_bf16(found)
    for options in (asked, DistOptions(device="mps", backend="gloo")):
        with pytest.raises(UsageError, match=r"2 workers with --device mps.*--workers 1"):
            pick_device(options, Placement(rank=1, world_size=2))


def test_metal_in_a_fork_of_what_has_used_it(a_mac: pytest.MonkeyPatch) -> None:
    a_mac.setattr(torch.mps, "_is_in_bad_fork", lambda: True)
    with pytest.raises(UsageError, match=r"forked from a process that has used the GPU.*restart"):
        pick_device(DistOptions(device="mps"), Placement())


def test_what_uses_a_gpu_already_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, used in (("xpu", True), ("xpu", False), ("mps", True)):
        here = torch.device(kind)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda here=here: here)
        monkeypatch.setattr(torch.xpu, "is_initialized", lambda used=used: used)
        assert begun_kind() == (kind if used and kind == "xpu" else None)
        assert kinds_here() == ("cpu", kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert (begun_kind(), kinds_here()) == (None, ("cpu",))


def test_an_apple_gpus_generator(a_mac: pytest.MonkeyPatch) -> None:
    own = torch.Generator()
    a_mac.setattr(torch.mps, "_get_default_mps_generator", lambda: own)
    assert generators(torch.device("mps", 0)) == [torch.default_generator, own]


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
