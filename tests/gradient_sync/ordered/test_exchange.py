"""Partial sums of several workers become the sum that one process computes, bit by bit."""

import gc
import multiprocessing
import time
from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.placement import Placement
from paceline.distributed.work_division import Division
from paceline.errors import UsageError
from paceline.gradient_sync.buckets import ALIGNMENT
from paceline.gradient_sync.ordered.exchange import Exchange, connect_leaders
from paceline.gradient_sync.ordered.reduction_tree import Node, TreeSum
from tests.support.ranks import LIMIT_S, run_ranks
from tests.support.shards import nested_sum

SPREADS = [(2, 2), (4, 2), (5, 2), (3, 3), (7, 3)]
SIZES = (1, 5, 2)
"""Buffers of a step, in units of a slice for each worker."""


def shares(shards: int, workers: int, units: int) -> list[Tensor]:
    """What each shard contributes; the same in every process."""
    generator = torch.Generator().manual_seed(units)
    return list(torch.randn(shards, workers * units * ALIGNMENT, generator=generator))


def own_sums(group: Group, every: Sequence[Tensor]) -> list[Tensor]:
    tree: TreeSum[Tensor] = TreeSum(len(every), torch.add)
    for shard in Division.of(len(every), group.world_size).parts_of(group.rank):
        tree.push(Node(0, shard), every[shard].clone())
    return tree.values


def start(group: Group, exchange: Exchange, shards: int, units: int) -> tuple[Tensor, list[Tensor]]:
    """Let one buffer go; gives where its sum will be, and the room that must stay."""
    sums = own_sums(group, shares(shards, group.world_size, units))
    room = [torch.full((size,), torch.nan) for size in exchange.room(len(sums[0]))]
    exchange.start(sums, room, most=2 * group.world_size * ALIGNMENT)
    return sums[0], [*sums, *room]


@pytest.mark.ranks
@pytest.mark.parametrize(("shards", "workers"), SPREADS)
@pytest.mark.parametrize("polls", [False, True])
@pytest.mark.core_cases(2)
def test_several_buffers_at_once_have_the_sums_of_one_process(
    shards: int, workers: int, polls: bool
) -> None:
    def body(group: Group) -> None:
        exchange = Exchange(group, shards)
        for _ in range(2):
            begun = []
            for units in SIZES:
                begun.append(start(group, exchange, shards, units))
                if polls:
                    exchange.poll()
            assert not exchange.finish(0)
            for units, (total, _) in zip(SIZES, begun, strict=True):
                assert torch.equal(total, nested_sum(shares(shards, workers, units)))
            exchange.reset()
        exchange.release()

    run_ranks(workers, body)


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [2, 3])
def test_what_went_wrong_on_one_worker_all_hear_in_that_step_alone(workers: int) -> None:
    def body(group: Group) -> list[bool]:
        exchange, heard = Exchange(group, workers), []
        for failing in (None, 0, workers - 1, None):
            _, held = start(group, exchange, workers, 1)
            heard.append(exchange.finish(int(group.rank == failing)))
            del held
        exchange.release()
        return heard

    assert run_ranks(workers, body) == [[False, True, True, False]] * workers


@pytest.mark.ranks
def test_a_step_without_buffers_is_complete() -> None:
    def body(group: Group) -> bool:
        exchange = Exchange(group, 2)
        found = exchange.finish(0)
        exchange.release()
        return found

    assert run_ranks(2, body) == [False, False]


@pytest.mark.ranks
def test_workers_that_leave_within_a_step_dont_wait_for_each_other() -> None:
    """One is in a second stage that the other hasn't begun, and that in a first one likewise."""
    is_there = multiprocessing.get_context("fork").Event()

    def body(group: Group) -> float:
        exchange = Exchange(group, 2, connect_leaders(group, [range(1), range(1, 2)]))
        held = [start(group, exchange, 2, 1)]
        if group.rank == 0:
            held.append(start(group, exchange, 2, 5))
            assert is_there.wait(LIMIT_S)  # or the other's first stage would lose its peer
        else:
            while not exchange._second:
                exchange.poll()
            is_there.set()
        since = time.monotonic()
        exchange.release()
        return time.monotonic() - since

    assert max(run_ranks(2, body)) < 0.5 * LIMIT_S


@pytest.mark.ranks
def test_what_was_forgotten_is_held_no_more() -> None:
    def body(group: Group) -> tuple[int, int]:
        exchange = Exchange(group, 4)
        total, held = start(group, exchange, 4, 500)
        exchange.finish(0)
        place, size = total.untyped_storage().data_ptr(), total.nbytes
        del held
        before = holders(place, size)
        exchange.reset()
        after = holders(place, size)
        exchange.release()
        return before, after

    for before, after in run_ranks(2, body):
        assert before > 1
        assert after == 1  # the test's own


def holders(place: int, size: int) -> int:
    """Count the tensors that keep this memory."""
    gc.collect()
    found = [thing for thing in gc.get_objects() if type(thing) is Tensor]
    return sum(place <= t.data_ptr() < place + size for t in found)


@pytest.mark.ranks
@pytest.mark.parametrize(("shards", "workers"), SPREADS)
@pytest.mark.core_cases(2)
def test_bytes_on_the_wire_are_those_that_the_collectives_get(
    shards: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted where torch is called: what goes to others, of an all-to-all and an all-gather."""
    sent: list[float] = []
    scatter, spread = dist.all_to_all_single, dist.all_gather_into_tensor

    def scattering(out: Tensor, given: Tensor, *args: object, **kwargs: object) -> object:
        if given.dtype == torch.float32:
            sent.append(given.nbytes * (workers - 1) / workers)
        return scatter(out, given, *args, **kwargs)  # type: ignore[arg-type]

    def spreading(out: Tensor, own: Tensor, **kwargs: object) -> object:
        sent.append(own.nbytes * (workers - 1))
        return spread(out, own, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(dist, "all_to_all_single", scattering)
    monkeypatch.setattr(dist, "all_gather_into_tensor", spreading)

    def body(group: Group) -> tuple[float, float]:
        exchange = Exchange(group, shards)
        total, _held = start(group, exchange, shards, 4)
        exchange.finish(0)
        exchange.release()
        return exchange.wire_bytes(total.nbytes), sum(sent)

    for told, counted in run_ranks(workers, body):
        assert told == pytest.approx(counted)


@pytest.mark.ranks
def test_released_it_leaves_its_process_group() -> None:
    def body(group: Group) -> tuple[int, int]:
        before = len(dist.distributed_c10d._world.pg_map)
        exchange = Exchange(group, 2)
        within = len(dist.distributed_c10d._world.pg_map)
        group.barrier()  # nobody leaves while another one still connects
        exchange.release()
        exchange.release()  # once is enough
        return within - before, len(dist.distributed_c10d._world.pg_map) - before

    assert run_ranks(2, body) == [(1, 0)] * 2


def test_a_backend_with_few_operations_is_refused() -> None:
    group = Group(Placement(rank=0, world_size=2), torch.device("cpu"), "smddp")
    with pytest.raises(UsageError, match="needs all-to-all, which --backend smddp"):
        Exchange(group, 2)
