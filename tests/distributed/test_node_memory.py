"""Workers of a node share memory, and nothing of it is left, however they end."""

import contextlib
import errno
import os
import signal
import socket
import sys
import time
from typing import Any

import pytest
import torch

from paceline.distributed import node_memory
from paceline.distributed.group import Group
from paceline.distributed.node_memory import NodeMemory, connect_node, runs_of
from paceline.distributed.placement import Placement
from paceline.errors import InfrastructureError
from tests.support.nodes import on_nodes
from tests.support.ranks import mapped_files, run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux alone"),
]


def connected(group: Group, timeout_s: float = 60.0) -> NodeMemory:
    memory = connect_node(group, timeout_s)
    assert memory is not None
    return memory


@pytest.mark.parametrize("workers", [2, 3])
def test_what_was_written_before_a_word_is_there_after_it(workers: int) -> None:
    def body(group: Group) -> list[list[int]]:
        memory = connected(group)
        first, second = memory.share(8), memory.share(4096)
        first[group.rank].fill_(group.rank + 1)
        second[group.rank][-1] = 7
        memory.post(b"w")
        received: dict[int, bytes] = {}
        others = set(range(workers)) - {group.rank}
        while set(received) < others:
            received |= dict(memory.receive(others - set(received)))
        assert set(received.values()) == {b"w"}
        memory.close()
        return [[int(block.sum()) for block in blocks] for blocks in (first, second)]

    wanted = [[8 * (rank + 1) for rank in range(workers)], [7] * workers]
    assert run_ranks(workers, body) == [wanted] * workers


def test_more_words_than_a_socket_takes_stop_nobody() -> None:
    """Both say them all before either listens."""
    words = 5000

    def body(group: Group) -> int:
        memory, count = connected(group), 0
        for _ in range(words):
            memory.post(b"w")
        while count < words:
            count += sum(len(said) for _, said in memory.receive([1 - group.rank]))
        return count

    assert run_ranks(2, body) == [words, words]


def test_memory_may_come_before_a_worker_has_heard_the_last_words() -> None:
    def body(group: Group) -> tuple[list[tuple[int, bytes]], int]:
        memory = connected(group)
        memory.post(b"abc")
        if group.rank == 1:
            time.sleep(0.2)  # the other's memory is in the same read as its words
            received = memory.receive([0])
            block = memory.share(64)[0]
        else:
            block = memory.share(64)[1]
            received = memory.receive([1])
        return received, len(block)

    assert run_ranks(2, body) == [([(1, b"abc")], 64), ([(0, b"abc")], 64)]


def test_a_worker_may_be_two_memories_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 keeps rank 2 waiting, while rank 1 has all it needs and goes on."""

    def body(group: Group) -> list[list[int]]:
        memory = connected(group)
        send = memory._send

        def slow_to_the_last(rank: int, word: bytes, rights: Any = ()) -> None:
            if rank == 2:
                time.sleep(0.3)
            send(rank, word, rights)

        if group.rank == 0:
            monkeypatch.setattr(memory, "_send", slow_to_the_last)
        calls = [memory.share(size) for size in (8, 16, 24)]
        for own in (blocks[group.rank] for blocks in calls):
            own.fill_(group.rank + 1)
        group.barrier()
        group.barrier()
        memory.close()
        return [[int(block.sum()) for block in blocks] for blocks in calls]

    wanted = [[size * (rank + 1) for rank in range(3)] for size in (8, 16, 24)]
    assert run_ranks(3, body) == [wanted] * 3


def test_memory_can_come_after_more_words_than_a_socket_takes() -> None:
    def body(group: Group) -> tuple[int, bool]:
        memory, count = connected(group), 0
        if group.rank == 1:
            time.sleep(0.3)
        else:
            with contextlib.suppress(BlockingIOError):
                while True:
                    memory._peers[1].send(b"w")
        block = memory.share(64)[1 - group.rank]
        while group.rank == 1 and count < 1:
            count += len(memory.receive([0]))
        return len(block), count > 0

    assert run_ranks(2, body) == [(64, False), (64, True)]


@pytest.mark.parametrize("after", ["its word", "nothing"])
def test_an_ended_worker_is_missed_only_by_who_waits_for_it(after: str) -> None:
    def body(group: Group) -> str:
        memory = connected(group)
        if group.rank == 1:
            if after == "its word":
                memory.post(b"w")
            memory.close()
            return ""
        if after == "its word":
            assert memory.receive([1]) == [(1, b"w")]
        with pytest.raises(InfrastructureError, match=r"rank 1 has ended: connection closed"):
            memory.receive([1])
        assert memory.receive() == []
        with pytest.raises(InfrastructureError, match=r"rank 1 has ended"):
            memory.post(b"w")
        return "told"

    assert run_ranks(2, body) == ["told", ""]


def test_a_worker_that_says_nothing_is_waited_for_so_long_and_no_longer() -> None:
    def body(group: Group) -> None:
        memory = connected(group, timeout_s=0.3)
        if group.rank == 0:
            with pytest.raises(InfrastructureError, match=r"timed out after 0.3 s .* rank 1"):
                memory.receive([1])
        group.barrier()

    run_ranks(2, body)


def test_memory_that_isnt_there_is_an_error_before_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(_descriptor: int, _begin: int, _size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def body(group: Group) -> str:
        memory = connected(group)
        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(InfrastructureError) as found:
            memory.share(1 << 20)
        return str(found.value)

    said = "no 1,048,576 bytes of memory to share with the node's workers: No space left on device"
    assert run_ranks(2, body) == [said, said]


@pytest.mark.parametrize(
    "why", ["two nodes", "an accelerator", "no socket", "no memory", "no way there", "smddp"]
)
def test_all_workers_hear_alike_that_memory_cant_be_shared(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(group: Group) -> bool:
        placement, device = group.placement, group.device
        if why == "two nodes":
            placement = Placement(rank=group.rank, world_size=2, node_rank=group.rank, nodes=2)
        elif why == "an accelerator":
            device = torch.device("cuda", 0)
        elif why == "no memory" and group.rank == 1:
            monkeypatch.setattr(os, "memfd_create", refuse)
        elif group.rank == 1:
            failing = "bind" if why == "no socket" else "connect"
            monkeypatch.setattr(socket, "socket", refusing(failing))
        backend, since = "smddp" if why == "smddp" else "gloo", time.monotonic()
        refused = connect_node(Group(placement, device, backend)) is None
        assert time.monotonic() - since < 0.5 * node_memory._CONNECT_S  # for nobody who can't come
        return refused

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize(
    ("node_of", "runs"),
    [
        ([0, 0, 0], [range(3)]),
        ([0, 0, 1, 1], [range(2), range(2, 4)]),
        ([1, 1, 0], [range(2), range(2, 3)]),
        ([0, 1, 2], None),  # nobody shares anything
        ([0, 0, 1, 0], None),
        ([0, 1, 0, 1], None),  # along a tree in rank order there would be nothing to add on a node
    ],
)
def test_nodes_are_runs_of_ranks(node_of: list[int], runs: list[range] | None) -> None:
    assert runs_of(node_of) == runs


def test_workers_of_two_nodes_meet_on_each() -> None:
    def body(group: Group) -> list[int]:
        memory = connect_node(on_nodes(group, (2, 1)), 60.0, several=True)
        assert memory is not None
        blocks = memory.share(8)
        blocks[memory.ranks.index(group.rank)].fill_(group.rank)
        memory.post(b"w")
        others = set(memory.ranks) - {group.rank}
        heard = {rank for rank, _ in memory.receive(others)}
        assert heard == others
        return [int(block[0]) for block in blocks]

    assert run_ranks(3, body) == [[0, 1], [0, 1], [2]]


def refuse(*_: object) -> None:
    raise PermissionError


def refusing(method: str) -> type[socket.socket]:
    return type("Refusing", (socket.socket,), {method: refuse})


def test_other_users_may_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: Group) -> bool:
        monkeypatch.setattr(node_memory, "_CONNECT_S", 0.1)
        if group.rank == 0:
            monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
        return connect_node(group, 60.0) is None

    assert run_ranks(2, body) == [True, True]


def test_who_is_killed_is_missed_and_leaves_nothing() -> None:
    def body(group: Group) -> None:
        before = mapped_files()
        memory = connected(group)
        memory.share(1 << 20)[group.rank].fill_(1)
        assert mapped_files() <= before  # so that nothing can be left
        if group.rank == 0:
            memory.post(b"w")
            with pytest.raises(InfrastructureError, match="rank 1 has ended"):
                memory.receive([1])
            return
        # A copy of rank 1 is the only one that is connected: the rank itself has to report.
        killed = os.fork()
        if killed == 0:
            memory.receive([0])
            os.kill(os.getpid(), signal.SIGKILL)
        memory.close()
        assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == -signal.SIGKILL

    run_ranks(2, body)
