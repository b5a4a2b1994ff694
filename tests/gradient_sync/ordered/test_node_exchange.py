"""The ordered sum in the memory of nodes: what the words between workers have to get right."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.distributed.node_memory import NodeMemory
from paceline.errors import InfrastructureError, JobError
from paceline.gradient_sync.buckets import lay_out
from paceline.gradient_sync.ordered import exchange as exchanging
from paceline.gradient_sync.ordered.exchange import Exchange
from paceline.gradient_sync.ordered.node_exchange import NodeExchange, _pool
from paceline.gradient_sync.ordered.reduce import OrderedSum
from tests.support.killed import kill_at_random
from tests.support.nodes import on_nodes
from tests.support.ranks import run_ranks
from tests.support.shards import (
    Net,
    assert_same_bits,
    expected_sums,
    fresh_net,
    gradients_of,
    loss_of,
    run_step,
)


@pytest.mark.parametrize(
    ("run", "shards", "buffers", "held"),
    [
        (range(1), 1, 1, [0]),
        (range(4), 4, 3, [0]),
        (range(8), 8, 4, [0]),
        (range(1, 4), 4, 3, [0, 1]),  # its left sibling is another worker's
        (range(3), 8, 2, [0, 1]),
    ],
)
def test_buffers_in_which_sums_end(run: range, shards: int, buffers: int, held: list[int]) -> None:
    assert _pool(run, shards) == (buffers, held)


@pytest.mark.ranks
def test_workers_of_one_node_sum_in_its_memory() -> None:
    def body(group: Group) -> bool:
        return isinstance(OrderedSum(group, 4)._exchange, NodeExchange)

    assert run_ranks(2, body) == [True, True]


@pytest.mark.ranks
@pytest.mark.parametrize("workers", [2, 3])
def test_a_sum_is_the_workers_own_as_soon_as_it_has_it(workers: int) -> None:
    """Clipping one worker's gradients in place changes nobody else's, however late they are."""

    def body(group: Group) -> None:
        model = fresh_net()
        ordered, wanted = OrderedSum(group, 4), expected_sums(model, 4)
        for step in range(6):
            if group.rank == step % workers:
                time.sleep(0.02)
            run_step(ordered, model)
            assert_same_bits(gradients_of(dict(model.named_parameters())), wanted)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.nan)
            if group.rank == (step + 1) % workers:
                time.sleep(0.02)

    run_ranks(workers, body)


SPREADS = [
    pytest.param(shards, sizes, id=f"{shards} on {sizes}")
    for shards, sizes in [
        (4, (2, 2)),
        (8, (2, 2)),
        (5, (2, 2)),  # a node holds a subtree and a single shard
        (7, (1, 2)),  # one owner on each node
        (6, (3, 2)),
        (9, (2, 1, 2)),
    ]
]


@pytest.mark.ranks
@pytest.mark.parametrize(("shards", "sizes"), SPREADS)
@pytest.mark.core_cases(1)
def test_nodes_sum_in_their_memory_and_exchange_what_they_come_to(
    shards: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits are those of one process, with every way to cut what travels."""
    monkeypatch.setattr(exchanging, "MIN_BYTES", 64)

    def body(group: Group) -> tuple[bool, int]:
        ordered, model = OrderedSum(on_nodes(group, sizes), shards, bucket_bytes=2000), fresh_net()
        wanted = expected_sums(model, shards)
        for step in range(26):
            if step % 7 == group.rank:  # also for longer than others wait at once
                time.sleep(0.12 if step == group.rank else 0.01)
            run_step(ordered, model)
            assert_same_bits(gradients_of(dict(model.named_parameters())), wanted)
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.nan)  # nobody else's
        exchange = ordered._exchange
        ordered.release()
        assert isinstance(exchange, NodeExchange)
        return exchange._across is not None, exchange.slices

    owners = min(sizes)
    wanted = [(place < owners, owners * len(sizes)) for size in sizes for place in range(size)]
    assert run_ranks(sum(sizes), body) == wanted


def test_a_worker_doesnt_wait_for_itself() -> None:
    """Where it has seen that all others are ready before it is."""
    memories = [
        NodeMemory(rank, [range(2)], {1 - rank: end}, timeout_s=1.0)
        for rank, end in enumerate(socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM))
    ]
    exchanges = [NodeExchange(memory, 2) for memory in memories]
    layouts = [lay_out([nn.Parameter(torch.zeros(100))], [0], 1 << 20, 2, 2) for _ in memories]
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(NodeExchange.prepare, exchanges, layouts))
    exchanges[1].send(layouts[1].buckets[0], layouts[1])
    exchanges[0]._receive([1])
    exchanges[0].send(layouts[0].buckets[0], layouts[0])
    exchanges[1].release()
    with pytest.raises(InfrastructureError, match="rank 1 has ended"):
        exchanges[0].finish(0)
    exchanges[0].release()


@pytest.mark.ranks
def test_what_goes_wrong_on_one_node_ends_the_step_on_all() -> None:
    """Also where the worker owns nothing, and on both nodes the other workers are right."""

    def body(group: Group) -> str:
        ordered, model = OrderedSum(on_nodes(group, (1, 2)), 3), fresh_net()
        run_step(ordered, model)

        def loss(net: nn.Module, shard: int) -> Tensor:
            total = loss_of(net, shard)
            return total + cast(Net, net).spare.weight.sum() if shard == 2 else total

        with pytest.raises(JobError) as found:
            run_step(ordered, model, loss)
        run_step(ordered, model)
        return str(found.value)

    for said in run_ranks(3, body):
        assert "spare.weight got a gradient in shard 2 on rank 2" in said


@pytest.mark.ranks
def test_a_link_carries_what_its_node_comes_to_once() -> None:
    """Twice half of it with two nodes, however many workers they have."""

    def body(group: Group) -> float:
        ordered, model = OrderedSum(on_nodes(group, (2, 2)), 4), fresh_net()
        run_step(ordered, model)
        exchange, layout = ordered._exchange, ordered._layout
        assert isinstance(exchange, NodeExchange)
        assert exchange._across is not None
        assert layout is not None
        total = sum(4 * bucket.size for bucket in layout.buckets)
        # Of the sum and the result half each, of each of the two: within the node, and across.
        assert ordered.wire_bytes == pytest.approx(total + total / 2)
        return exchange._across.wire_bytes(total / 2) * 2 / total

    assert run_ranks(4, body) == [1.0] * 4


@pytest.mark.ranks
def test_a_worker_that_loses_another_node_says_so_to_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(_self: Exchange, _pieces: object, _within_s: float) -> bool:
        raise RuntimeError("Connection closed by peer [10.0.0.2]:1234")

    def body(group: Group) -> str:
        ordered, model = OrderedSum(on_nodes(group, (2, 2)), 4), fresh_net()
        run_step(ordered, model)
        if group.rank == 0:
            monkeypatch.setattr(Exchange, "has_come", fails)
        if group.rank < 2:
            with pytest.raises(InfrastructureError) as found:
                run_step(ordered, model)
            return str(found.value)
        return ""

    told, heard, *_ = run_ranks(4, body)
    assert told == (
        "rank 0 has lost rank 2 on another node: Connection closed by peer [10.0.0.2]:1234"
    )
    assert heard == "rank 0 has lost rank 2 on another node: connection closed by peer"


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(3,), (2, 2), (1, 2)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_one_killed_at_any_instant_is_missed_by_all_others(
    seed: int, sizes: tuple[int, ...], tmp_path: Path
) -> None:
    """And can leave nothing behind."""
    assert len(kill_at_random(seed, tmp_path, sizes)) == sum(sizes) - 1
