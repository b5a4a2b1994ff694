"""The ordered sum in a node's memory: what the words between workers have to get right."""

import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.distributed.group import Group
from paceline.errors import InfrastructureError
from paceline.gradient_sync.ordered.node_exchange import NodeExchange, _pool
from paceline.gradient_sync.ordered.reduce import OrderedSum
from tests.launch.waiting import until
from tests.support.ranks import RankError, mapped_files, run_ranks
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
    kill_at_random(seed, tmp_path)


def train_on(ordered: OrderedSum, model: nn.Module) -> None:
    while True:
        run_step(ordered, model)


def kill_at_random(seed: int, place: Path) -> None:
    chance = random.Random(seed)
    victim, after_s = chance.randrange(3), chance.uniform(0, 0.1)

    def body(group: Group) -> None:
        if group.rank == victim and os.fork() == 0:
            # It holds the pipe by which the test would learn of the end, and end the others.
            with suppress(TimeoutError):
                until(lambda: len(list(place.iterdir())) == 2)
            os._exit(0)
        before = mapped_files()
        model = fresh_net()
        ordered = OrderedSum(group, 8)
        run_step(ordered, model)
        assert mapped_files() <= before  # so that nothing can be left
        group.barrier()
        if group.rank == victim:
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            signal.setitimer(signal.ITIMER_REAL, 0.001 + after_s)
        with pytest.raises(InfrastructureError, match=r"rank \d has ended: connection closed"):
            train_on(ordered, model)
        (place / str(group.rank)).touch()
        time.sleep(60)  # until the test has learned of the end

    with pytest.raises(RankError):
        run_ranks(3, body)
    missed = {int(path.name) for path in place.iterdir()}
    assert missed == {0, 1, 2} - {victim}
