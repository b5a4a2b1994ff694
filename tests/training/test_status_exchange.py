from dataclasses import replace

import pytest
import torch

from paceline.distributed.group import Group
from paceline.distributed.work_division import Division
from paceline.errors import InterruptedTraining, JobError
from paceline.metrics.counters import Totals
from paceline.training.status_exchange import (
    Agreement,
    Status,
    StopFlag,
    agree,
    agree_on_pause,
    steps_to_next,
)
from tests.support.ranks import run_ranks


def status(rank: int, signalled: int | None, bad: dict[int, int]) -> Status:
    return Status(
        signalled=rank == signalled,
        bad_step=bad.get(rank),
        counted=Totals(loss=0.5 * rank, samples=10 + rank, top1=rank, top5=2 * rank)
        .as_row()
        .unsqueeze(0),
        lap_s=1.0 + rank,
        data_s=0.25 * rank,
    )


def one_each(group: Group) -> Division:
    return Division.of(None, group.world_size)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.core_cases(2)
def test_all_learn_the_same(world_size: int) -> None:
    def body(group: Group, signalled: int | None, bad: dict[int, int]) -> Agreement:
        return agree(status(group.rank, signalled, bad), group, one_each(group))

    last = world_size - 1
    for signalled, bad in ((None, {}), (last, {last: 7}), (0, {0: 9, last: 7})):
        results = run_ranks(world_size, body, signalled, bad)
        assert results == [results[0]] * world_size
        found = results[0]
        assert found.signalled == (signalled is not None)
        assert found.bad == ((7, last) if bad else None)
        assert found.lap_s == 1.0  # rank 0's clock
        assert found.data_s == 0.25 * last  # the slowest
        assert found.totals.samples == sum(10 + rank for rank in range(world_size))
        assert found.totals.loss == sum(0.5 * rank for rank in range(world_size))


@pytest.mark.ranks
@pytest.mark.parametrize("told", ["step", "skipped"])
def test_workers_that_took_other_steps_say_so(told: str) -> None:
    """Their sums are about other steps, and would be shown and saved as if they weren't."""

    def body(group: Group) -> str:
        own, number = status(group.rank, None, {}), 5 + (group.rank == 1)
        own = replace(own, step=number) if told == "step" else replace(own, skipped=number)
        with pytest.raises(JobError) as caught:
            agree(own, group, one_each(group))
        return str(caught.value)

    found = run_ranks(3, body)
    assert all("have not taken the same steps" in message for message in found)
    assert ("rank 1 has done 6, 0 of them" if told == "step" else "0, 6 of them") in found[1]


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_what_is_given_besides_reaches_all_in_rank_order(world_size: int) -> None:
    def body(group: Group) -> tuple[list[list[float]], list[list[float]]]:
        own = torch.tensor([0.1, 7.0 + group.rank], dtype=torch.float64)
        agreed = agree(status(group.rank, None, {}), group, one_each(group), own)
        return agreed.more.tolist(), agreed.counted.tolist()

    more = [[0.1, 7.0 + rank] for rank in range(world_size)]
    counted = [[0.5 * rank, 10.0 + rank, rank, 2.0 * rank] for rank in range(world_size)]
    assert run_ranks(world_size, body) == [(more, counted)] * world_size


@pytest.mark.ranks
def test_of_two_bad_losses_the_earlier_step_is_named_and_then_the_lower_rank() -> None:
    def body(group: Group, bad: dict[int, int]) -> tuple[int, int] | None:
        return agree(status(group.rank, None, bad), group, one_each(group)).bad

    assert run_ranks(3, body, {0: 5, 1: 3, 2: 3}) == [(3, 1)] * 3


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_pause_is_as_long_as_rank_0_says(world_size: int) -> None:
    def body(group: Group) -> float:
        return agree_on_pause(2.5 + group.rank, StopFlag(under_launcher=True), group)

    assert run_ranks(world_size, body) == [2.5] * world_size


@pytest.mark.ranks
@pytest.mark.parametrize("told", [0, 1, 2])
def test_an_evaluation_that_a_signal_cut_short_on_one_worker_ends_all(told: int) -> None:
    def body(group: Group) -> None:
        flag = StopFlag(under_launcher=True)
        flag.cut_short = group.rank == told
        with pytest.raises(InterruptedTraining):
            agree_on_pause(1.0, flag, group)

    run_ranks(3, body)


@pytest.mark.parametrize(
    ("step_s", "last", "expected"),
    [(0.1, 10, 10), (0.2, 9, 5), (0.001, 4, 8), (1e-9, 900, 1000), (7.0, 1, 1), (0.0, 64, 1)],
)
def test_about_once_a_second_and_at_most_twice_as_late(
    step_s: float, last: int, expected: int
) -> None:
    assert steps_to_next(step_s, last) == expected
