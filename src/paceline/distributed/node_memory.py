"""Shared memory of the workers of one node, and messages between them about its content.

Nothing of it has a name in a file system: memory is anonymous (`memfd_create`), its descriptors go
through Unix sockets of Linux's abstract namespace, and the kernel takes all of it back with the
last process, however that ends. Containers with a small `/dev/shm` don't limit it.
"""

import mmap
import os
import secrets
import select
import socket
import struct
import sys
from array import array
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import pairwise
from math import inf
from time import monotonic
from typing import TypeAlias, final

import torch
from torch import Tensor

from paceline.distributed.device import is_accelerator
from paceline.distributed.group import Group, group_timeout
from paceline.errors import InfrastructureError

_CREDENTIALS = struct.Struct("3i")
"""What SO_PEERCRED gives: process, user and group."""
_RANK = struct.Struct("i")
_CONNECT_S = 30.0
_READ_BYTES = 4096
_RIGHTS_BYTES = 64
"""Room for the descriptor that comes with a message, and its header."""
_RETRY_S = 0.001
_Rights: TypeAlias = tuple[int, int, "array[int]"]
"""What a message brings beside its bytes: level, kind and content."""
_DESCRIPTOR = b"m"
"""What comes with the descriptor of shared memory."""


def connect_node(
    group: Group,
    timeout_s: float | None = None,
    *,
    several: bool = False,
    beside_accelerators: bool = False,
) -> "NodeMemory | None":
    """Connect the workers of each node by its main memory. Collective.

    Args:
        group: All workers.
        timeout_s: Seconds without a message from a worker after which waiting for it is an error;
            by default as for all that the group does.
        several: Whether there may be several nodes, of which each has memory of its own.
        beside_accelerators: Whether it is of use to workers whose tensors are on accelerators.

    Returns:
        None on every worker where those of some node can't share memory (containers with networks
        of their own, another system than Linux), or have no use for it, where there are more nodes
        than there may be, or they have one worker each, or ranks that don't follow each other, or
        where the backend has ways of its own within a node: MPI, SageMaker's.
    """
    if group.has_few_operations:
        return None
    has_use = beside_accelerators or not is_accelerator(group.device)
    # Every worker takes part in each exchange below, also where it can't share memory itself.
    # 1. Listen, and tell all workers the socket's name and this worker's node.
    with ExitStack() as opened:
        listener = _listener(group) if has_use else None
        if listener is not None:
            opened.enter_context(listener)
        name = "" if listener is None else listener.getsockname()[1:].decode()
        names = group.gather_texts(name)
        places = group.gather_rows(torch.tensor([group.placement.node_rank]))
        nodes = runs_of(places[:, 0].tolist())
        nodes = None if nodes is not None and len(nodes) > 1 and not several else nodes
        # 2. Connect to the lower ranks of the node; then accept the higher ones.
        peers: dict[int, socket.socket] | None = None
        if listener is not None and nodes is not None and all(names):
            peers = _reach(group.rank, _node_of(group.rank, nodes), names)
        # Nobody waits for one who can't come.
        if _is_true_of_all(group, peers is not None) and listener and peers is not None and nodes:
            peers = _admit(peers, len(_node_of(group.rank, nodes)) - 1, listener)
        # 3. Agree: one worker that isn't connected means the process group for all.
        is_connected = _is_true_of_all(group, peers is not None)
    if is_connected and peers is not None and nodes is not None:
        patience_s = group_timeout().total_seconds() if timeout_s is None else timeout_s
        return NodeMemory(group.rank, nodes, peers, patience_s)
    _close(peers or {})
    return None


def runs_of(node_of: Sequence[int]) -> list[range] | None:
    """Say which ranks are on each node.

    Args:
        node_of: Every worker's node, in rank order.

    Returns:
        Runs of ranks, in order; None where a node's don't follow each other, or no node has two.
    """
    starts = [rank for rank, node in enumerate(node_of) if not rank or node != node_of[rank - 1]]
    runs = [range(*pair) for pair in pairwise([*starts, len(node_of)])]
    is_split = len(runs) > len(set(node_of))
    return None if is_split or max(map(len, runs)) == 1 else runs


def _is_true_of_all(group: Group, own: bool) -> bool:
    return bool(group.gather_rows(torch.tensor([own], dtype=torch.uint8)).all())


def _node_of(rank: int, nodes: Sequence[range]) -> range:
    return next(ranks for ranks in nodes if rank in ranks)


def _listener(group: Group) -> socket.socket | None:
    """Listen where the other workers of this node can come."""
    may_share = sys.platform == "linux" and group.placement.settled
    if not may_share or not _may_make_memory():
        return None
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.bind(f"\0paceline-{secrets.token_hex(16)}")
        made.listen(group.world_size)
    except OSError:
        made.close()
        return None
    made.settimeout(_CONNECT_S)
    return made


def _may_make_memory() -> bool:
    """Tell whether the system lets this process have anonymous memory: a sandbox may not."""
    try:
        os.close(_made(mmap.PAGESIZE))
    except OSError:
        return False
    return True


def _made(size: int) -> int:
    """Make memory; gives its descriptor.

    Raises:
        OSError: There isn't as much, or it isn't allowed.
    """
    made = os.memfd_create("paceline", os.MFD_CLOEXEC)
    try:
        # Taken now: memory that is missing later would end the process by SIGBUS.
        os.posix_fallocate(made, 0, size)
    except OSError:
        os.close(made)
        raise
    return made


def _reach(own_rank: int, ranks: range, names: Sequence[str]) -> dict[int, socket.socket] | None:
    """Connect to a node's lower ranks; None if one can't be reached."""
    peers: dict[int, socket.socket] = {}
    try:
        for rank in range(ranks.start, own_rank):
            peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            peers[rank] = peer
            peer.settimeout(_CONNECT_S)
            peer.connect(f"\0{names[rank]}")
            peer.sendall(_RANK.pack(own_rank))
    except OSError:
        _close(peers)
        return None
    return peers


def _admit(
    peers: dict[int, socket.socket], number: int, listener: socket.socket
) -> dict[int, socket.socket] | None:
    """Accept connections of a node's higher ranks; None if one doesn't connect."""
    try:
        while len(peers) < number:
            peer, _ = listener.accept()
            peer.settimeout(_CONNECT_S)
            # Names are readable by other users of the machine: they may not come.
            credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, user, _ = _CREDENTIALS.unpack(credentials)
            own = peer.recv(_RANK.size, socket.MSG_WAITALL) if user == os.getuid() else b""
            if len(own) == _RANK.size:
                peers[_RANK.unpack(own)[0]] = peer
            else:
                peer.close()
    except OSError:
        _close(peers)
        return None
    return peers


def _close(peers: Mapping[int, socket.socket]) -> None:
    for peer in peers.values():
        peer.close()


@final
class NodeMemory:
    """Shared memory and sockets of a node's workers, made by `connect_node`.

    The socket between two workers orders their memory: who has read a message sees all that its
    sender had written before.
    """

    def __init__(
        self,
        rank: int,
        nodes: Sequence[range],
        peers: Mapping[int, socket.socket],
        timeout_s: float,
    ) -> None:
        self.rank = rank
        self.nodes = nodes
        """Ranks of each node's workers."""
        self.ranks = _node_of(rank, nodes)
        """Ranks of this node's workers."""
        self.workers = len(self.ranks)
        self._peers = dict(peers)
        self._timeout_s = timeout_s
        self._unread: list[tuple[int, bytes]] = []
        """Read while something was to be sent."""
        self._descriptors: dict[int, deque[int]] = {rank: deque() for rank in peers}
        """By rank: of memory that came before it was asked for, maybe of several calls."""
        self._ended: set[int] = set()
        """Ranks whose sockets are closed."""
        self._poll = select.poll()
        self._rank_of: dict[int, int] = {}
        for other, peer in peers.items():
            peer.setblocking(False)
            self._poll.register(peer, select.POLLIN)
            self._rank_of[peer.fileno()] = other

    def share(self, size: int) -> list[Tensor]:
        """Get memory from every worker. Collective, between two steps' messages.

        Args:
            size: Bytes of each worker's; the same on all.

        Returns:
            Of each of the node's workers: (size,) uint8, zeros, of which all see the same. It is
            there as long as a tensor of it.

        Raises:
            InfrastructureError: There isn't as much memory, or a worker has ended.
        """
        # Make this worker's memory, and send its descriptor to each of the others.
        try:
            own = _made(size)
        except OSError as error:
            raise InfrastructureError(
                f"no {size:,} bytes of memory to share with the node's workers: {error.strerror}"
            ) from error
        try:
            mapped = {self.rank: _mapped(own, size)}
            for rank in self._peers:
                self._send(rank, _DESCRIPTOR, _rights(own))
        finally:
            os.close(own)
        # Take theirs; a mapping stays when its descriptor is closed.
        for rank in self._peers:
            descriptor = self._receive_descriptor(rank)
            try:
                mapped[rank] = _mapped(descriptor, size)
            finally:
                os.close(descriptor)
        return [mapped[rank] for rank in self.ranks]

    def post(self, message: bytes) -> None:
        """Send a message of a few bytes to every other worker. Doesn't block.

        A socket takes some 200 messages that its receiver hasn't read.

        Raises:
            InfrastructureError: A worker has ended, or reads nothing.
        """
        for rank in self._peers:
            self._send(rank, message)

    def receive(
        self, waiting_for: Collection[int] = (), at_most_s: float = inf
    ) -> list[tuple[int, bytes]]:
        """Give what the others have sent since: ranks and bytes.

        Args:
            waiting_for: Ranks, one of which has to send something first.
            at_most_s: Seconds after which nothing is given instead.

        Raises:
            InfrastructureError: One of these has ended, or sends nothing for too long.
        """
        received, self._unread = self._unread, []
        # With nothing to wait for, or where one may have ended, what is there comes first.
        if not waiting_for or received or self._ended:
            received += self._read(0.0)
        if received or not waiting_for:
            return received
        waiting = self._seconds_left(waiting_for)
        while not received:
            left_s = next(waiting)
            received = self._read(min(left_s, at_most_s))
            if at_most_s < left_s:
                break
        return received

    def close(self) -> None:
        """Leave the others. Local to the worker; memory stays as long as tensors of it."""
        _close(self._peers)
        self._peers = {}
        for waiting in self._descriptors.values():
            while waiting:
                os.close(waiting.popleft())

    def _read(self, timeout_s: float) -> list[tuple[int, bytes]]:
        received = []
        for number, _ in self._poll.poll(1000 * timeout_s):
            rank = self._rank_of[number]
            try:
                content, rights, _, _ = self._peers[rank].recvmsg(_READ_BYTES, _RIGHTS_BYTES)
            except ConnectionError:
                content, rights = b"", []
            for _, _, descriptor in rights:
                self._descriptors[rank].extend(array("i", descriptor))
            if not content:  # it may have sent before all that it had to send
                self._ended.add(rank)
                self._poll.unregister(self._peers[rank])
            elif messages := content.replace(_DESCRIPTOR, b""):
                received.append((rank, messages))
        return received

    def _seconds_left(self, ranks: Collection[int]) -> Iterator[float]:
        """Give the seconds that are left to wait for one of these, again and again.

        Raises:
            InfrastructureError: One of them has ended, or no time is left.
        """
        until_s = monotonic() + self._timeout_s
        while True:
            for rank in self._ended.intersection(ranks):
                raise _lost(rank)
            left_s = until_s - monotonic()
            if left_s <= 0:
                listed = ", ".join(map(str, sorted(ranks)))
                raise InfrastructureError(
                    f"timed out after {self._timeout_s:g} s of waiting for rank {listed}"
                )
            yield left_s

    def _receive_descriptor(self, rank: int) -> int:
        waiting = self._seconds_left([rank])
        while not self._descriptors[rank]:
            self._unread += self._read(next(waiting))
        return self._descriptors[rank].popleft()

    def _send(self, rank: int, message: bytes, rights: Sequence[_Rights] = ()) -> None:
        """Send to a worker; where it has much to read, read meanwhile, as it may do the same."""
        waiting = self._seconds_left([rank])
        while True:
            try:
                if rights:
                    self._peers[rank].sendmsg([message], rights)
                else:
                    self._peers[rank].send(message)
            except BlockingIOError:
                self._unread += self._read(min(next(waiting), _RETRY_S))
            except OSError as error:
                raise _lost(rank) from error
            else:
                return


def _rights(descriptor: int) -> list[_Rights]:
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [descriptor]))]


def _mapped(descriptor: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)


def _lost(rank: int) -> InfrastructureError:
    return InfrastructureError(f"rank {rank} has ended: connection closed by peer")
