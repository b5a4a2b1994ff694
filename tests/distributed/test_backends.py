import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.distributed.backends import (
    control_device,
    has_few_operations,
    load_backend,
    name_for_torch,
)
from paceline.distributed.environment import current_placement
from paceline.distributed.group import Group, joined
from paceline.errors import UsageError
from tests.support import standin
from tests.support.agent import AgentStore
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("backend", "name", "few"),
    [
        ("gloo", "gloo", False),
        ("nccl", "cpu:gloo,cuda:nccl", False),
        ("xccl", "cpu:gloo,xpu:xccl", False),
        ("mpi", "mpi", True),
        ("smddp", "smddp", True),
    ],
)
def test_what_a_backend_carries(backend: str, name: str, few: bool) -> None:
    gpu = torch.device("cuda", 0)
    assert name_for_torch(backend) == name
    assert has_few_operations(backend) == few
    assert control_device(backend, gpu) == (gpu if backend == "smddp" else CPU)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("smddp", r"--backend smddp needs SageMaker's library .*use --backend auto elsewhere"),
        ("mpi", r"--backend mpi needs a PyTorch .* built from source with MPI"),
        ("xccl", r"--backend xccl needs PyTorch's build for Intel GPUs"),
        ("nccl", r"--backend nccl can't carry tensors of a cpu device, only of cuda"),
    ],
)
def test_a_backend_that_isnt_here(backend: str, message: str) -> None:
    if backend in ("mpi", "xccl") and getattr(dist, f"is_{backend}_available")():
        pytest.skip(f"this PyTorch has {backend}")
    with pytest.raises(UsageError, match=message):
        load_backend(backend, CPU)


def under_the_stand_in(body_path: Path, group: Group, store: AgentStore) -> None:
    store.become_worker(group)
    sys.path.insert(0, str(body_path))


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_groups_collectives_need_only_a_few_operations(world_size: int, tmp_path: Path) -> None:
    store, package = AgentStore(), standin.install(tmp_path)

    def body(outer: Group) -> tuple[list[list[float]], int, int, str, list[str], bool]:
        under_the_stand_in(package, outer, store)
        with joined(current_placement(), CPU, "smddp", 60.0) as group:
            rows = group.gather_rows(torch.tensor([group.rank, 0.5]))
            summed = group.sum_(torch.tensor(group.rank + 1))
            last = world_size - 1
            sent = group.broadcast_(torch.tensor(group.rank + 5), last)
            group.barrier()
            texts = group.broadcast_text(f"é{group.rank}"), group.gather_texts(f"é{group.rank}")
        return rows.tolist(), int(summed), int(sent), *texts, bool(standin.CALLS)

    expected = (
        [[float(rank), 0.5] for rank in range(world_size)],
        world_size * (world_size + 1) // 2,
        world_size + 4,
        "é0",
        [f"é{rank}" for rank in range(world_size)],
        world_size > 1,
    )
    assert run_ranks(world_size, body) == [expected] * world_size


@pytest.mark.ranks
def test_pytorchs_ddp_stays_within_them_too(tmp_path: Path) -> None:
    store, package = AgentStore(), standin.install(tmp_path)

    def gradients() -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        replica = DistributedDataParallel(model)
        for _ in range(3):  # from the second on with buckets in their final order
            replica(torch.randn(5, 4)).square().sum().backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    def body(outer: Group) -> tuple[list[Tensor], list[Tensor], set[str]]:
        by_gloo = gradients()
        under_the_stand_in(package, outer, store)
        with joined(current_placement(), CPU, "smddp", 60.0):
            return by_gloo, gradients(), set(standin.CALLS)

    for by_gloo, ours, calls in run_ranks(2, body):
        assert all(map(torch.equal, by_gloo, ours))
        assert len(ours) == 6
        assert calls == {"all_reduce", "all_gather", "broadcast"}


@pytest.mark.ranks
def test_the_stand_in_refuses_everything_else(tmp_path: Path) -> None:
    store, package = AgentStore(), standin.install(tmp_path)
    refused: list[Callable[[], object]] = [
        lambda: dist.all_gather_into_tensor(torch.zeros(2), torch.ones(1)),
        lambda: dist.all_reduce(torch.ones(1), op=dist.ReduceOp.AVG),
        lambda: dist.new_group([0, 1]),
    ]

    def body(outer: Group) -> int:
        under_the_stand_in(package, outer, store)
        with joined(current_placement(), CPU, "smddp", 60.0) as group:
            group.barrier()  # a rank that leaves ends what the other still connects
            for call in refused:
                with pytest.raises(RuntimeError, match="SMDDP does not support"):
                    call()
        return len(refused)

    assert run_ranks(2, body) == [3, 3]
