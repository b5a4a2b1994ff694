"""Transfers a snapshot from the node that has it to those that lack it, by the process group."""

import socket
from collections.abc import Iterator
from contextlib import closing
from mmap import mmap
from typing import final

import torch

from paceline.checkpoint.manifest import Manifest
from paceline.checkpoint.store import SnapshotStore
from paceline.checkpoint.streaming import (
    PIECE_BYTES,
    Piece,
    parse_sent,
    pieces_of,
    read_pieces,
)
from paceline.distributed.group import Group
from paceline.errors import InfrastructureError, SnapshotError


def transfer_snapshot(
    store: SnapshotStore, group: Group, manifest: str, owner: int, *, is_missing: bool
) -> str:
    """Give a snapshot to the nodes that lack it. Collective.

    Phases: who lacks it, and is there room; its pieces, each from the owner to all workers; did it
    arrive. Costs a few pieces of memory on each worker, and nothing where nobody lacks it.

    Args:
        manifest: The snapshot's, the same on every worker.
        is_missing: Whether this worker is to write it for its node.

    Returns:
        Empty, or what is wrong with the owner's snapshot; then nobody has received anything.

    Raises:
        InfrastructureError: A node couldn't write it; the same on every worker.
    """
    content = parse_sent(manifest.encode())
    num_bytes = len(manifest) + sum(entry.bytes for entry in content.files.values())
    what = f"the snapshot of step {content.step} ({num_bytes} bytes) from rank {owner}"

    # Who lacks it, and is there room?
    if not group.gather_rows(torch.tensor([is_missing], dtype=torch.uint8)).any():
        return ""
    problem = ""
    if is_missing:
        try:
            store.check_room(num_bytes)
        except OSError as error:
            problem = _explain(error, what)
    _refuse(group.gather_texts(problem))

    # Its pieces, each from the owner to all workers
    stream = _Stream(store, group, content, owner)
    pieces = stream.pieces()
    if is_missing:
        try:
            store.receive(manifest, pieces)
        except (OSError, SnapshotError) as error:
            problem = _explain(error, what)
    for _ in pieces:  # the others still exchange what this worker has no use for
        pass

    # Did it arrive?
    problems = group.gather_texts(stream.fault if group.rank == owner else problem)
    if problems[owner]:
        return problems[owner]
    _refuse(problems)
    return ""


@final
class _Stream:
    """One snapshot's pieces, exchanged as they are asked for."""

    def __init__(self, store: SnapshotStore, group: Group, content: Manifest, owner: int) -> None:
        self._store = store
        self._group = group
        self._content = content
        self._owner = owner
        self.fault = ""
        """On the owner: why it couldn't read on."""

    def pieces(self) -> Iterator[Piece]:
        """Exchange one piece after another; ends early where the owner can't read on. Collective.

        Each piece is overwritten by the next.
        """
        # Starts at a page, which writing past the page cache asks for. After a piece comes a byte
        # that says whether the owner could read it.
        memory = mmap(-1, PIECE_BYTES + 1)
        buffer, view = torch.frombuffer(memory, dtype=torch.uint8), memoryview(memory)
        step, is_owner = self._content.step, self._group.rank == self._owner
        with closing(read_pieces(self._store.path_of(step), self._content, view)) as reading:
            for name, size in pieces_of(self._content):
                if is_owner:
                    buffer[size] = self._read(reading)
                self._group.broadcast_(buffer[: size + 1], self._owner)
                if not buffer[size]:
                    return
                yield name, view[:size]

    def _read(self, reading: Iterator[int]) -> bool:
        try:
            next(reading)
        except (OSError, SnapshotError) as error:
            self.fault = str(error)
        return not self.fault


def _explain(error: OSError | SnapshotError, what: str) -> str:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return f"{socket.gethostname()} can't take over {what}: {reason}"


def _refuse(problems: list[str]) -> None:
    found = "; ".join(filter(None, problems))
    if found:
        raise InfrastructureError(f"{found}. Make room there, or leave that host out")
