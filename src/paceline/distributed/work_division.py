"""Which worker does which part of a step: one part each, or a run of fixed shards.

Imports no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Self, final

from paceline.errors import UsageError
from paceline.options.figures import plural

if TYPE_CHECKING:
    from torch import Tensor


def share(total: int, part: int, parts: int) -> tuple[int, int]:
    """Cut `total` items into contiguous parts whose sizes differ by at most one, larger ones first.

    Returns:
        Begin and end of one part; equal when there are fewer items than parts before it.

    Raises:
        ValueError: `part` isn't one of the parts.
    """
    if not 0 <= part < parts:
        raise ValueError(f"part {part} is none of {parts} parts (they count from 0)")
    size, larger = divmod(total, parts)
    begin = part * size + min(part, larger)
    return begin, begin + size + (part < larger)


@final
@dataclass(frozen=True)
class Division:
    """How the parts of a step are dealt out: contiguous runs, in rank order. Pure."""

    parts: int
    world_size: int
    is_fixed: bool = False
    """Whether the parts are shards, the same for any number of workers."""

    @classmethod
    def of(cls, shards: int | None, world_size: int) -> Self:
        """Divide a step into fixed shards, or into one part for each worker.

        Raises:
            UsageError: There are more workers than shards.
        """
        if shards is not None and shards < world_size:
            raise UsageError(
                f"{world_size} workers are more than --shards {shards}: each needs one at least. "
                f"Use at most {plural(shards, 'worker')}; the number of shards belongs to the "
                "training"
            )
        return cls(shards or world_size, world_size, is_fixed=shards is not None)

    def parts_of(self, rank: int) -> range:
        """Give the parts of one worker."""
        return range(*share(self.parts, rank, self.world_size))

    def parts_of_all(self, ranks: range) -> range:
        """Give the parts of workers that follow each other."""
        return range(self.parts_of(ranks[0]).start, self.parts_of(ranks[-1]).stop)

    @cached_property
    def most(self) -> int:
        """The most parts that any worker has."""
        return -(-self.parts // self.world_size)

    @cached_property
    def _places(self) -> list[int]:
        """Where each part's row is among those of all workers, `most` of each."""
        ranks = range(self.world_size)
        return [self.most * r + place for r in ranks for place in range(len(self.parts_of(r)))]

    def cuts(self, total: int) -> Iterator[tuple[int, int]]:
        """Give begin and end of each part of `total` items."""
        return (share(total, part, self.parts) for part in range(self.parts))

    def padded(self, rows: "Tensor") -> "Tensor":
        """Make one row of a worker's rows, as long on every worker.

        Args:
            rows: (parts of this worker, K).

        Returns:
            (most * K,), zeros at the end.
        """
        if self.most == 1:
            return rows[0]
        padded = rows.new_zeros(self.most, rows.shape[1])
        padded[: len(rows)] = rows
        return padded.flatten()

    def in_order(self, gathered: "Tensor") -> "Tensor":
        """Take the rows of all parts out of what all workers have given.

        Args:
            gathered: (world_size, most * K), each row as `padded` makes it.

        Returns:
            (parts, K), the same for every number of workers.
        """
        if self.most == 1:
            return gathered.contiguous()
        rows = gathered.reshape(self.world_size * self.most, gathered.shape[1] // self.most)
        return rows[self._places]
