import gc
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from paceline.distributed.address import Address
from paceline.distributed.group import Group
from paceline.distributed.placement import Placement
from paceline.distributed.rendezvous import (
    arrive,
    common_text,
    leave,
    of_attempt,
    open_store,
    settled,
    wait_until_read,
)
from paceline.errors import InfrastructureError, UsageError
from tests.support.ports import free_port
from tests.support.ranks import run_ranks

UNSETTLED = Placement(rank=2, world_size=4, settled=False, source="options")


@pytest.mark.parametrize(
    ("nodes", "local_ranks", "local_rank", "local_world_size", "node_rank"),
    [
        ("aabb", [0, 1, 0, 1], 0, 2, 1),
        ("aabb", [0, 1, 1, 0], 1, 2, 1),  # in an order of their own
        ("aaba", [0, 1, 0, 2], 0, 1, 1),  # 3 + 1
        ("aaaa", [0, 0, 0, 0], 2, 4, 0),  # nobody was told one
        ("aabb", [0, 1, 2, 3], 0, 2, 1),  # not those of a node
        ("bbaa", [0, 1, 0, 1], 0, 2, 1),
    ],
)
def test_nodes_are_counted(
    nodes: str, local_ranks: list[int], local_rank: int, local_world_size: int, node_rank: int
) -> None:
    found = settled(UNSETTLED, list(nodes), local_ranks)
    expected = replace(
        UNSETTLED,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=node_rank,
        nodes=len(set(nodes)),
        settled=True,
    )
    assert found == expected


@pytest.mark.ranks
@pytest.mark.parametrize("scheme", ["tcp", "file"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_all_meet_and_hear_rank_0(scheme: str, world_size: int, tmp_path: Path) -> None:
    meeting = Address(scheme="file", path=str(tmp_path / "meeting"))
    if scheme == "tcp":
        meeting = Address(scheme="tcp", host="127.0.0.1", port=free_port())

    def body(group: Group) -> tuple[int, int, str, set[str]]:
        store = open_store(meeting, group.rank, world_size, 60.0, None)
        assert open_store(meeting, group.rank, world_size, 60.0, None) is store
        own = of_attempt(store, 0)
        told = common_text(own, group.rank, "what", f"from {group.rank}")
        own_place = Placement(rank=group.rank, world_size=world_size, settled=False)
        place = arrive(own, meeting, own_place, 60.0)
        listening = {
            entry.laddr.ip
            for entry in psutil.Process().net_connections("inet")
            if entry.status == psutil.CONN_LISTEN
        }
        group.barrier()
        leave(own, meeting, group.rank, world_size)
        return place.local_rank, place.local_world_size, told, listening

    found = run_ranks(world_size, body)
    assert [row[:3] for row in found] == [
        (rank, world_size, "from 0") for rank in range(world_size)
    ]
    assert set().union(*(row[3] for row in found)) <= {"127.0.0.1"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
def test_sessions_one_after_another_at_one_port() -> None:
    meeting = Address(scheme="tcp", host="127.0.0.1", port=free_port())

    def body(group: Group) -> list[str]:
        told = []
        for session in range(3):
            store = of_attempt(open_store(meeting, group.rank, 3, 60.0, None), 0)
            arrive(store, meeting, Placement(rank=group.rank, world_size=3), 60.0)
            told.append(common_text(store, group.rank, "what", f"of session {session}"))
            if group.rank == 0:
                wait_until_read(store, "what", 3)
                time.sleep(0.3)  # the others are at their next session long before
            leave(store, meeting, group.rank, 3, meets_again=True)
            del store
        return told

    assert run_ranks(3, body) == [[f"of session {session}" for session in range(3)]] * 3


def test_a_store_let_go_leaves_its_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    meeting = Address(scheme="file", path=str(path))
    store = open_store(meeting, 0, 2, 60.0, None)
    store.set("told", "something")
    before = path.read_bytes()
    open_store.cache_clear()
    del store
    gc.collect()
    # A worker that wrote here would make the file anew after the last one removed it.
    assert path.read_bytes() == before


@pytest.mark.ranks
def test_two_workers_of_one_rank(tmp_path: Path) -> None:
    meeting = Address(scheme="file", path=str(tmp_path / "meeting"))

    def body(group: Group) -> str:
        store = of_attempt(open_store(meeting, 0, 3, 60.0, None), 0)
        with pytest.raises(UsageError) as caught:  # the one who came first hears of it too
            arrive(store, meeting, Placement(rank=0, world_size=3), 60.0)
        return str(caught.value)

    for told in run_ranks(2, body):
        assert "two workers have rank 0. Remove the file" in told


def test_who_didnt_come(tmp_path: Path) -> None:
    meeting = Address(scheme="file", path=str(tmp_path / "meeting"))
    store = of_attempt(open_store(meeting, 0, 3, 60.0, None), 0)
    with pytest.raises(InfrastructureError, match=r"ranks \[1, 2\] did not come to file://"):
        arrive(store, meeting, Placement(rank=0, world_size=3), 0.1)
    leave(store, meeting, 0, 3)


def test_rank_0_that_isnt_there() -> None:
    meeting = Address(scheme="tcp", host="127.0.0.1", port=free_port())
    with pytest.raises(InfrastructureError, match=r"rank 1 on .* did not reach rank 0 at tcp://"):
        open_store(meeting, 1, 2, 1.0, None)


def test_a_file_in_no_directory(tmp_path: Path) -> None:
    meeting = Address(scheme="file", path=str(tmp_path / "nowhere" / "meeting"))
    with pytest.raises(UsageError, match=r"there is no directory .*nowhere here"):
        open_store(meeting, 0, 2, 1.0, None)
