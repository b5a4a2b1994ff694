"""The ordered sum in a node's memory: what the words between workers have to get right."""

import time
from pathlib import Path

import pytest
import torch

from paceline.distributed.group import Group
from paceline.gradient_sync.ordered.node_exchange import NodeExchange, _pool
from paceline.gradient_sync.ordered.reduce import OrderedSum
from tests.support.killed import kill_at_random
from tests.support.ranks import run_ranks
from tests.support.shards import assert_same_bits, expected_sums, fresh_net, gradients_of, run_step


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


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_one_killed_at_any_instant_is_missed_by_all_others(seed: int, tmp_path: Path) -> None:
    """And can leave nothing behind."""
    assert len(kill_at_random(seed, tmp_path)) == 2
