"""Small rows gathered through the memory that the workers of one node share.

Gloo takes 0.3 to 7 ms for them, mostly the scheduling of its threads between busy workers; this way
the training's own threads do it all (figures: benchmarks/README.md, "Training speed").
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
        self._places = [block.view(2, _MOST_BYTES) for block in memory.share(2 * _MOST_BYTES)]
        self._own = self._places[memory.ranks.index(memory.rank)]
        self._turn = 0
        self._ahead = dict.fromkeys((rank for rank in memory.ranks if rank != memory.rank), 0)
        """By other rank: rows that it has written and nobody has asked for here."""

    def takes(self, row: Tensor) -> bool:
        """Tell whether a row is small enough, and not empty; the same on every worker."""
        return 0 < row.nbytes <= _MOST_BYTES

    def gather(self, row: Tensor) -> Tensor:
        """Collect a row from each worker; see `Group.gather_rows`.

        Raises:
            InfrastructureError: A worker has ended, or doesn't come.
        """
        # Write this worker's row, and tell the others. Where a worker is in another collective by
        # mistake, what its row lacks is zero, and not whatever stood there.
        turn, self._turn = self._turn, 1 - self._turn
        size = row.nbytes
        self._own[turn].zero_()
        self._own[turn, :size] = row.view(torch.uint8)
        self._memory.post(_WRITTEN)
        # Wait for theirs.
        ahead = self._ahead
        while missing := [rank for rank, rows in ahead.items() if not rows]:
            for rank, messages in self._memory.receive(missing):
                ahead[rank] += len(messages)
        for rank in ahead:
            ahead[rank] -= 1
        return torch.stack([place[turn, :size] for place in self._places]).view(row.dtype)
