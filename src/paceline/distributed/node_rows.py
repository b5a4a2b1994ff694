"""Small rows gathered through the memory that the workers of one node share.

Gloo takes 0.4 to 7 ms for them, mostly the scheduling of its threads between busy workers; this way
the training's own threads do it all, in 0.2 ms (two workers on two cores).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.node_memory import NodeMemory, connect_node

_MOST_BYTES = 1 << 14
"""Of a row; a longer one takes the backend's way."""
_HEADER_BYTES = 16
"""Before each row: which collective it is of, and how many bytes it has."""
_ROWS, _COLLECTIVES = 0, ("all-gather", "all-reduce", "broadcast")
_WRITTEN = b"w"


@contextmanager
def rows_in_memory(group: Group) -> Iterator[None]:
    """Gather the group's small rows in memory, where all workers are on one node. Collective."""
    memory = connect_node(group, beside_accelerators=True) if group.world_size > 1 else None
    if memory is None:
        yield
        return
    try:
        group.small_rows = NodeRows(memory)
        yield
    finally:
        group.small_rows = None
        memory.close()


@final
class NodeRows:
    """Gathers rows. Collective, by all workers of the node in the same order.

    Each worker has two places and writes to them by turns: when it comes to one again, all others
    have written the row after, and thus read the one that stood there.
    """

    def __init__(self, memory: NodeMemory) -> None:
        self._memory = memory
        size = _HEADER_BYTES + _MOST_BYTES
        blocks = [block.view(2, size) for block in memory.share(2 * size)]
        self._headers = [block[:, :_HEADER_BYTES].view(torch.int64) for block in blocks]
        self._places = [block[:, _HEADER_BYTES:] for block in blocks]
        self._own = memory.ranks.index(memory.rank)
        self._turn = 0
        self._ahead = dict.fromkeys((rank for rank in memory.ranks if rank != memory.rank), 0)
        """By other rank: rows that it has written and nobody has asked for here."""

    def takes(self, row: Tensor) -> bool:
        """Tell whether a row can go this way; the same on every worker."""
        return row.is_cpu and 0 < row.nbytes <= _MOST_BYTES

    def gather(self, row: Tensor) -> Tensor:
        """Collect a row from each worker; see `Group.gather_rows`.

        Raises:
            RuntimeError: Another worker is in another collective; the launcher says which one each
                is in (`launch/errors/mismatch.py`).
            InfrastructureError: A worker has ended, or doesn't come.
        """
        size = row.nbytes
        self._places[self._own][self._turn, :size] = row.view(torch.uint8)
        turn = self._meet(_ROWS, size)
        return torch.stack([place[turn, :size] for place in self._places]).view(row.dtype)

    def meet(self, collective: str, size: int) -> None:
        """Wait for all workers before a collective of the backend.

        The backend wouldn't notice that another worker is in one that goes this way.

        Args:
            collective: Its name.
            size: Bytes of what it is about; the same on every worker.

        Raises:
            RuntimeError, InfrastructureError: As `gather`.
        """
        self._meet(1 + _COLLECTIVES.index(collective), size)

    def _meet(self, kind: int, size: int) -> int:
        """Say what this worker is in, wait for the others, and compare; give the turn."""
        turn, self._turn = self._turn, 1 - self._turn
        own = torch.tensor([kind, size])
        self._headers[self._own][turn] = own
        self._memory.post(_WRITTEN)
        # Wait for theirs.
        ahead = self._ahead
        while missing := [rank for rank, rows in ahead.items() if not rows]:
            for rank, messages in self._memory.receive(missing):
                ahead[rank] += len(messages)
        for rank in ahead:
            ahead[rank] -= 1
        if any(not torch.equal(header[turn], own) for header in self._headers):
            listed = [_described(*header[turn].tolist()) for header in self._headers]
            raise RuntimeError(
                "mismatch between collectives: "
                + ", ".join(
                    f"rank {rank} is in {what}"
                    for rank, what in zip(self._memory.ranks, listed, strict=True)
                )
            )
        return turn


def _described(kind: int, size: int) -> str:
    name = _COLLECTIVES[kind - 1] if kind else "an exchange of rows"
    return f"{name} of {size} bytes"
