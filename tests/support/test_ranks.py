import faulthandler
import os
import signal

import pytest
import torch

from paceline.distributed.group import Group
from tests.support.ranks import RankError, run_ranks

pytestmark = pytest.mark.ranks


def add_ranks(group: Group, start: int) -> tuple[int, int]:
    return group.rank, int(group.sum_(torch.tensor(group.rank + start)))


def fail_on(group: Group, failing: int) -> None:
    if group.rank == failing:
        raise ValueError("of this rank alone")
    group.barrier()


def die_on(group: Group, failing: int) -> None:
    if group.rank == failing:
        os._exit(7)
    group.barrier()


def wait_forever(group: Group) -> None:
    faulthandler.disable()  # the stacks that a hanging rank shows would only confuse here
    if group.rank == 0:
        group.barrier()
    signal.pause()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_runs_the_body(world_size: int) -> None:
    total = sum(rank + 10 for rank in range(world_size))
    assert run_ranks(world_size, add_ranks, 10) == [(rank, total) for rank in range(world_size)]


@pytest.mark.parametrize("failing", [0, 2])
def test_the_first_failure_is_raised_and_not_what_follows_from_it(failing: int) -> None:
    with pytest.raises(RankError, match=rf"rank {failing} failed:(?s:.*)of this rank alone"):
        run_ranks(3, fail_on, failing)


def test_a_rank_that_dies_fails_the_test() -> None:
    with pytest.raises(RankError, match="failed"):
        run_ranks(2, die_on, 1)


def test_ranks_that_hang_are_killed() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0, 1\] were not done after 0.2 s"):
        run_ranks(2, wait_forever, limit_s=0.2)
