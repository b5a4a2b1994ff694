import socket
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.distributed import group as group_module
from paceline.distributed.environment import current_placement
from paceline.distributed.group import Group, joined
from paceline.distributed.options import DistOptions
from paceline.distributed.placement import Placement
from paceline.errors import InterruptedTraining, JobError
from tests.support.agent import AgentStore
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks
CPU = torch.device("cpu")
WORLDS = pytest.mark.parametrize("world_size", [1, 2, 3])


@WORLDS
def test_rows_come_in_rank_order(world_size: int) -> None:
    def body(group: Group) -> Tensor:
        return group.gather_rows(torch.tensor([group.rank, 10.0 * group.rank]))

    expected = torch.tensor([[rank, 10.0 * rank] for rank in range(world_size)])
    assert all(torch.equal(rows, expected) for rows in run_ranks(world_size, body))


def test_large_tensors_dont_stay() -> None:
    def body(group: Group) -> list[bool]:
        tensors = [torch.ones(size) for size in (1 << 20, 4, 1 << 20, 4)]
        kept = [weakref.ref(group.sum_(tensor)) for tensor in tensors]
        del tensors
        return [reference() is not None for reference in kept]

    # The small ones stay, and of the large ones the last.
    assert run_ranks(2, body) == [[False, True, True, True]] * 2


@WORLDS
def test_sums_and_broadcasts_are_in_place(world_size: int) -> None:
    def body(group: Group) -> tuple[int, int]:
        summed, sent = torch.tensor([group.rank + 1]), torch.tensor([group.rank + 5])
        assert group.sum_(summed) is summed
        assert group.broadcast_(sent) is sent
        group.barrier()
        return int(summed), int(sent)

    total = world_size * (world_size + 1) // 2
    assert run_ranks(world_size, body) == [(total, 5)] * world_size


@WORLDS
def test_a_broadcast_fills_a_tensor_with_gaps_and_nothing_else(world_size: int) -> None:
    def body(group: Group) -> list[list[float]]:
        memory = torch.full((6, 8), float(group.rank))
        gapped, transposed = memory[:, ::2], torch.full((2, 3), float(group.rank)).t()
        scattered = torch.full((4, 1), float(group.rank))[1:3].expand(2, 5)
        for sent in (gapped, transposed, scattered):
            assert group.broadcast_(sent) is sent
        # Not sent: what lies between the elements of `gapped`.
        return [sent.unique().tolist() for sent in (gapped, transposed, scattered, memory[:, 1::2])]

    zero = [[0.0]] * 3
    assert run_ranks(world_size, body) == [[*zero, [float(rank)]] for rank in range(world_size)]


@WORLDS
def test_each_rank_can_broadcast(world_size: int) -> None:
    def body(group: Group) -> list[int]:
        own = [torch.tensor([group.rank + 5]) for _ in range(world_size)]
        return [int(group.broadcast_(sent, source)) for source, sent in enumerate(own)]

    assert run_ranks(world_size, body) == [[5, 6, 7][:world_size]] * world_size


@WORLDS
@pytest.mark.parametrize("text", ["", "a", "naïve ☃", "\0", "x" * 5000])
def test_texts_reach_everyone(text: str, world_size: int) -> None:
    def body(group: Group) -> tuple[str, list[str]]:
        own = f"{text}{group.rank}" if group.rank else text
        return group.broadcast_text(own), group.gather_texts(own)

    texts = [text, *(f"{text}{rank}" for rank in range(1, world_size))]
    assert run_ranks(world_size, body) == [(text, texts)] * world_size


@WORLDS
def test_joining_by_the_environment(world_size: int) -> None:
    store = AgentStore()

    def body(outer: Group, attempt: int) -> list[str]:
        store.become_worker(outer, attempt)
        with joined(current_placement(), CPU, "gloo", 60.0) as group:
            assert dist.is_initialized() == (world_size > 1)
            told = group.gather_texts(f"{attempt}-{group.rank}")
        assert not dist.is_initialized()
        return told

    for attempt in (0, 1):  # on the same store: the second must not meet the first's addresses
        told = [f"{attempt}-{rank}" for rank in range(world_size)]
        assert run_ranks(world_size, body, attempt) == [told] * world_size


def test_a_group_is_left_after_an_error_too() -> None:
    def body(outer: Group) -> bool:
        with pytest.raises(ValueError, match="ours"), joined(Placement(), CPU, "gloo", 1.0):
            raise ValueError("ours")
        return True

    assert run_ranks(1, body) == [True]


@pytest.mark.parametrize(
    ("ends_by", "is_left"), [(ValueError, False), (InterruptedTraining, True), (None, True)]
)
def test_gpus_leave_their_group_only_where_all_workers_do(
    ends_by: type[Exception] | None, is_left: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leaving NCCL's waits for collectives that the others may never enter."""
    store = AgentStore()

    def body(outer: Group) -> bool:
        store.become_worker(outer)
        monkeypatch.setattr(group_module, "is_accelerator", lambda _: True)
        with (
            suppress(ValueError, InterruptedTraining),
            joined(current_placement(), CPU, "gloo", 60.0) as group,
        ):
            group.barrier()  # a rank that leaves ends what the other still connects
            if ends_by is not None:
                raise ends_by
        left = not dist.is_initialized()
        if not left:
            dist.destroy_process_group()
        return left

    assert run_ranks(2, body) == [is_left] * 2


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_workers_that_differ_dont_connect(world_size: int) -> None:
    store = AgentStore()

    def body(outer: Group) -> str:
        store.become_worker(outer)
        facts = {"lr": "0.02" if outer.rank == 1 else "0.01"}
        try:
            with joined(current_placement(), CPU, "gloo", 60.0, None, facts) as group:
                return f"{group.world_size} connected"
        except JobError as error:
            assert not dist.is_initialized()
            return str(error)

    found = run_ranks(world_size, body)
    assert len(set(found)) == 1
    assert ("rank 1 on " in found[0]) == (world_size > 1)
    assert ("1 connected" in found[0]) == (world_size == 1)


def test_without_a_store_they_are_compared_by_the_group() -> None:
    def body(group: Group) -> str:
        group_module._compare(group, {"lr": "1"})
        with pytest.raises(JobError) as error:
            group_module._compare(group, {"lr": str(group.rank)})
        return str(error.value)

    first, *others = run_ranks(3, body)
    assert others == [first, first]
    assert "rank 2 on " in first


def test_hosts_are_named() -> None:
    assert run_ranks(2, lambda group: group.hosts()) == [[socket.gethostname()] * 2] * 2


def test_workers_that_differ_leave_no_file_behind(tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"

    def body(outer: Group) -> bool:
        options = DistOptions(init_method=f"file://{meeting}", rank=outer.rank, world_size=2)
        facts = {"lr": str(outer.rank)}
        dist.destroy_process_group()
        with pytest.raises(JobError, match="has lr 1, rank 0"):
            joined(current_placement(options), CPU, "gloo", 60.0, options, facts).__enter__()
        return True

    assert run_ranks(2, body) == [True, True]
    assert not meeting.exists()
