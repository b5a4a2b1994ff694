"""Small rows gathered in memory are those that the backend gathers, and need nothing of it."""

import sys
import time
from collections.abc import Callable, Collection
from typing import cast

import pytest
import torch
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.node_rows import NodeRows, rows_in_memory
from paceline.errors import InfrastructureError
from paceline.launch.errors.mismatch import is_mismatch
from tests.support.collectives import collectives_so_far
from tests.support.nodes import on_nodes
from tests.support.ranks import run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux alone"),
]


def rows_of(rank: int) -> list[Tensor]:
    """Make rows of all kinds that are gathered; they depend on the rank."""
    draw = torch.Generator().manual_seed(rank)
    return [
        torch.tensor([rank == 1]),
        torch.tensor([rank, 1 << 40]),
        torch.randint(0, 255, (7,), generator=draw, dtype=torch.uint8),
        torch.randn(5, generator=draw, dtype=torch.float64) / 0,
        torch.randn(4, 6, generator=draw)[:, 2],
        torch.empty(0, dtype=torch.float64),
        torch.randn(2048, generator=draw, dtype=torch.float64),
    ]


@pytest.mark.parametrize("workers", [2, 3])
def test_rows_are_those_of_the_backend(workers: int) -> None:
    def body(group: Group) -> tuple[bool, int]:
        """All but the empty row need no collective of the backend."""
        expected = [group.gather_rows(row) for row in rows_of(group.rank)]
        with rows_in_memory(group):
            before = collectives_so_far()
            # By turns, the places are written to again and again.
            found = [[group.gather_rows(row) for row in rows_of(group.rank)] for _ in range(20)]
            used = collectives_so_far() - before
        assert group.small_rows is None
        same = all(
            have.dtype == want.dtype
            and have.shape == want.shape
            and bytes(have.view(torch.uint8).numpy()) == bytes(want.view(torch.uint8).numpy())
            for turn in found
            for have, want in zip(turn, expected, strict=True)
        )
        return same, used

    assert run_ranks(workers, body) == [(True, 20)] * workers


def test_what_was_given_stays_as_it_is() -> None:
    """Nobody gets a view of memory that later rows go to."""

    def body(group: Group) -> list[list[int]]:
        with rows_in_memory(group):
            gathered = [group.gather_rows(torch.tensor([10 * i + group.rank])) for i in range(5)]
        return [rows[:, 0].tolist() for rows in gathered]

    wanted = [[10 * i, 10 * i + 1] for i in range(5)]
    assert run_ranks(2, body) == [wanted, wanted]


def test_a_slow_worker_reads_what_was_gathered_with_it() -> None:
    """The other has written its next row by then."""

    def body(group: Group) -> list[list[int]]:
        with rows_in_memory(group):
            if group.rank == 1:
                memory = cast("NodeRows", group.small_rows)._memory
                receive = memory.receive

                def late(waiting_for: Collection[int]) -> list[tuple[int, bytes]]:
                    received = receive(waiting_for)
                    time.sleep(0.1)
                    return received

                # A real race, made wide.
                memory.receive = late  # type: ignore[method-assign, assignment]
            gathered = [group.gather_rows(torch.tensor([10 * i + group.rank])) for i in range(4)]
        return [rows[:, 0].tolist() for rows in gathered]

    wanted = [[10 * i, 10 * i + 1] for i in range(4)]
    assert run_ranks(2, body) == [wanted, wanted]


def test_long_rows_and_those_of_several_nodes_take_the_backends_way() -> None:
    def body(group: Group) -> tuple[bool, int, bool]:
        with rows_in_memory(group):
            before = collectives_so_far()
            long = group.gather_rows(torch.full((1 << 13,), float(group.rank)))
            used = collectives_so_far() - before
        apart = on_nodes(group, (1, 1))
        with rows_in_memory(apart):
            has_way = apart.small_rows is not None
        return bool((long[1] == 1).all()), used, has_way

    assert run_ranks(2, body) == [(True, 1, False)] * 2


@pytest.mark.parametrize("other", ["shorter", "longest", "sum", "broadcast"])
def test_workers_in_different_collectives_are_told_so(other: str) -> None:
    def body(group: Group) -> str:
        calls: dict[str, Callable[[], object]] = {
            "rows": lambda: group.gather_rows(torch.ones(4)),
            "shorter": lambda: group.gather_rows(torch.ones(1)),
            "longest": lambda: group.gather_rows(torch.ones(1 << 14)),
            "sum": lambda: group.sum_(torch.ones(4)),
            "broadcast": lambda: group.broadcast_(torch.ones(4)),
        }
        with rows_in_memory(group):
            assert group.sum_(torch.ones(4)).tolist() == [2.0] * 4
            mine = "rows" if group.rank == 0 else other
            with pytest.raises(RuntimeError, match="mismatch between collectives") as error:
                calls[mine]()
            return str(error.value)

    texts = run_ranks(2, body)
    assert texts[0] == texts[1]
    assert all(map(is_mismatch, texts))
    assert "rank 0 is in an exchange of rows of 16 bytes, rank 1 is in" in texts[0]


def test_rows_on_a_device_take_the_backends_way() -> None:
    def body(group: Group) -> bool:
        with rows_in_memory(group):
            return cast("NodeRows", group.small_rows).takes(torch.ones(4, device="meta"))

    assert run_ranks(2, body) == [False, False]


def test_a_worker_that_has_ended_is_an_error_at_once() -> None:
    def body(group: Group) -> None:
        with rows_in_memory(group):
            group.gather_rows(torch.ones(1))
            if group.rank == 0:
                with pytest.raises(InfrastructureError, match="rank 1 has ended"):
                    group.gather_rows(torch.ones(1))

    run_ranks(2, body)
