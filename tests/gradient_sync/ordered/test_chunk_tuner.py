"""How gradients are cut is found by trying, alike on all workers, and changes no bit."""

import math
import statistics

import pytest
import torch

from paceline.distributed.group import Group
from paceline.distributed.placement import Placement
from paceline.distributed.work_division import Division
from paceline.gradient_sync.buckets import ALIGNMENT
from paceline.gradient_sync.ordered import chunk_tuner as graining
from paceline.gradient_sync.ordered import exchange as exchanging
from paceline.gradient_sync.ordered.chunk_tuner import CUTS, ChunkTuner, Cut
from paceline.gradient_sync.ordered.exchange import Exchange
from paceline.gradient_sync.ordered.reduce import OrderedSum
from paceline.gradient_sync.ordered.reduction_tree import Node, TreeSum
from tests.support.ranks import run_ranks
from tests.support.shards import (
    assert_same_bits,
    expected_sums,
    fresh_net,
    gradients_of,
    nested_sum,
    run_step,
)
from tests.support.tiers import slow

STEPS = 24
"""More than it takes to find out."""


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Stop the clock: it shows the last one of these."""
    times = [0.0]
    monkeypatch.setattr(graining, "perf_counter", lambda: times[-1])
    return times


@pytest.mark.parametrize("fastest", CUTS)
def test_the_fastest_cut_is_kept(fastest: Cut, seconds: list[float]) -> None:
    grain = ChunkTuner()
    tried = []
    while not grain.is_settled:
        told = grain.report()
        grain.begin()
        grain.begin()  # of another bucket
        tried.append(grain.cut)
        seconds.append(seconds[-1] + (1.0 if grain.cut == fastest else 1.1))
        grain.end(torch.tensor([told, told]))
    assert grain.cut == fastest
    assert told == pytest.approx([1e6 if cut == fastest else 1.1e6 for cut in CUTS], abs=1)
    assert min(tried.count(cut) for cut in CUTS) > 6
    assert len(tried) < STEPS


def test_what_all_workers_measured_is_added_up(seconds: list[float]) -> None:
    grain = ChunkTuner()
    while not any(grain.report()):
        grain.begin()
        seconds.append(seconds[-1] + 1)
        grain.end(torch.zeros(3, len(CUTS), dtype=torch.int64))
    grain.end(torch.tensor([[10, 20, 30], [90, 90, 10], [60, 60, 80]]))
    assert grain.cut == CUTS[2]
    assert grain.is_settled


@pytest.mark.parametrize(("fine", "kept"), [(960, CUTS[2]), (980, CUTS[0])])
def test_a_finer_cut_must_be_clearly_faster(fine: int, kept: Cut, seconds: list[float]) -> None:
    grain = ChunkTuner()
    while not any(grain.report()):
        grain.begin()
        seconds.append(seconds[-1] + 1)
        grain.end(torch.zeros(1, len(CUTS), dtype=torch.int64))
    grain.end(torch.tensor([[1000, 1100, fine]]))
    assert grain.cut == kept


def test_the_first_time_of_a_cut_isnt_counted(seconds: list[float]) -> None:
    grain, seen = ChunkTuner(), set[Cut]()
    while not any(grain.report()):
        grain.begin()
        seconds.append(seconds[-1] + (2 if grain.cut in seen else 99))
        seen.add(grain.cut)
        grain.end(torch.zeros(1, len(CUTS), dtype=torch.int64))
    assert grain.report() == [2_000_000] * len(CUTS)


def test_a_long_first_time_doesnt_move_the_median_of_the_others(seconds: list[float]) -> None:
    """Of an even number of times, as one cut has, one more at the end would."""
    grain, counts = ChunkTuner(), dict.fromkeys(CUTS, 0)
    while not any(grain.report()):
        grain.begin()
        counts[grain.cut] += 1
        seconds.append(seconds[-1] + (99 if counts[grain.cut] == 1 else counts[grain.cut]))
        grain.end(torch.zeros(1, len(CUTS), dtype=torch.int64))
    medians = [statistics.median(range(2, counts[cut] + 1)) for cut in CUTS]
    assert grain.report() == [1_000_000 * median for median in medians]


def test_steps_in_which_nothing_leaves_arent_counted(seconds: list[float]) -> None:
    grain = ChunkTuner()
    for _ in range(100):
        grain.end(torch.zeros(2, len(CUTS), dtype=torch.int64))
    assert grain.cut == CUTS[0]
    assert not grain.is_settled


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("shards", "workers"), [(2, 2), (5, 3), slow(8, 8), slow(16, 4), slow(7, 5)]
)
@pytest.mark.parametrize("units", [1, 2, 7, 40])
@pytest.mark.core_cases(1)
def test_sums_have_the_same_bits_however_they_are_cut(
    shards: int, workers: int, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchanging, "MIN_BYTES", 64)

    def body(group: Group) -> tuple[Cut, set[Cut]]:
        every = torch.randn(shards, workers * units * ALIGNMENT, generator=seeded())
        wanted = nested_sum(list(every))
        tree: TreeSum[torch.Tensor] = TreeSum(shards, torch.add)
        for shard in Division.of(shards, workers).parts_of(group.rank):
            tree.push(Node(0, shard), every[shard])
        exchange = Exchange(group, shards)
        exchange.try_cuts()
        sums = [torch.empty_like(value) for value in tree.values]
        room = [torch.empty(length) for length in exchange.room(every.shape[1])]
        most, tried = math.ceil(units / 2) * workers * ALIGNMENT, set()
        for _ in range(STEPS):
            for there, here in zip(sums, tree.values, strict=True):
                there.copy_(here)
            tried.add(exchange.cut)
            exchange.start(sums, room, most)
            exchange.poll()
            assert not exchange.finish(0)
            assert torch.equal(sums[0], wanted)
        exchange.release()
        return exchange.cut, tried

    results = run_ranks(workers, body)
    assert len({cut for cut, _ in results}) == 1
    assert [tried for _, tried in results] == [set(CUTS)] * workers


@pytest.mark.ranks
@pytest.mark.parametrize("nodes", [1, 2])
def test_only_what_crosses_a_network_is_cut(nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = []
    monkeypatch.setattr(ChunkTuner, "begin", lambda _self: begun.append(1))

    def body(group: Group) -> int:
        place = Placement(rank=group.rank, world_size=2, node_rank=group.rank % nodes, nodes=nodes)
        apart, model = Group(place, group.device, group.backend), fresh_net()
        ordered, wanted = OrderedSum(apart, 2), expected_sums(model, 2)
        for _ in range(3):
            run_step(ordered, model)
            assert_same_bits(gradients_of(dict(model.named_parameters())), wanted)
        return len(begun)

    assert [count > 0 for count in run_ranks(2, body)] == [nodes > 1] * 2


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)
