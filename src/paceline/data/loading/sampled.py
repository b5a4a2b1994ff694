"""The order in which a script's own sampler draws samples, or batches, alike on every worker."""

import zlib
from collections.abc import Iterable, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np

from paceline.data.loading.dataset_worker import seeded
from paceline.data.order import Indices
from paceline.data.splitmix import Domain
from paceline.errors import DataError

_MOST_DRAWN = 10_000_000
"""An epoch may draw at least so many samples."""
_MOST_PASSES = 20
"""And as many as so many passes over the data have; more is taken for endless."""
_ENDLESS = 2**31
"""A sampler that says that it draws so many goes on until somebody stops it."""


@final
@dataclass(frozen=True, kw_only=True)
class Drawn:
    """The indices that a sampler has drawn for an epoch."""

    indices: Indices
    """(N,): samples."""
    bounds: Indices | None = None
    """(steps + 1,): where each batch begins, and the last one's end, if the sampler makes batches;
    None where all have one size."""


@final
class SampledOrder:
    """Draws each epoch's samples as one process would, on every worker by itself.

    The default generators are seeded by (seed, epoch) for it. What a sampler keeps itself (a
    generator, a count of epochs) comes to where it was by drawing all epochs before, which a
    resumed training does anew; one with a method `set_epoch` needs none of them.
    """

    def __init__(
        self, sampler: Iterable[Any], seed: int, *, in_batches: bool = False, samples: int = 0
    ) -> None:
        """Create the sampled order.

        Args:
            sampler: The script's; draws alike on every worker.
            seed: The training's.
            in_batches: It draws lists of indices, each of them a batch.
            samples: Of the data set, where that is known.
        """
        self.sampler = sampler
        self.in_batches = in_batches
        self._seed = seed
        self._samples = samples
        self._next = 0
        self._last = -1, Drawn(indices=np.empty(0, np.int64))

    @cached_property
    def first(self) -> Drawn:
        """What epoch 0 draws; evaluations go through the same."""
        return self._draw(0)

    def __len__(self) -> int:
        """Count the samples of the first epoch."""
        return len(self.first.indices)

    @property
    def sizes(self) -> list[int]:
        """How many samples each batch of the first epoch has; empty where all have one size."""
        bounds = self.first.bounds
        return [] if bounds is None else np.diff(bounds).tolist()

    @property
    def checksum(self) -> str:
        """Sum up what epoch 0 draws, to be compared between workers."""
        sums = zlib.crc32(self.first.indices.tobytes(), zlib.crc32(bytes(str(self.sizes), "ascii")))
        return f"{len(self)} samples, {sums:08x}"

    def of(self, epoch: int) -> Drawn:
        """Draw the samples of an epoch, the same each time it is asked for.

        Raises:
            DataError: They make another number of steps than in the first epoch, or are no indices.
        """
        if epoch == 0:
            return self.first
        if self._last[0] != epoch:
            expected = self._count(self.first)
            # A sampler without `set_epoch` has state: draw the epochs before this one, too.
            set_epoch = getattr(self.sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            else:
                for passed in range(self._next, epoch):
                    self._draw(passed)
            self._last = epoch, self._draw(epoch)
            # Steps per epoch are settled by the first one, the schedule follows from them.
            if (drawn := self._count(self._last[1])) != expected:
                what = "batches" if self.in_batches else "samples"
                raise DataError(
                    f"the {self._name} drew {drawn:,} {what} in epoch {epoch + 1} and {expected:,} "
                    f"in the first: every epoch has as many steps, so draw as many {what} in each"
                )
        return self._last[1]

    @property
    def _name(self) -> str:
        return type(self.sampler).__name__

    def _count(self, drawn: Drawn) -> int:
        return len(drawn.indices) if drawn.bounds is None else len(drawn.bounds) - 1

    def _draw(self, epoch: int) -> Drawn:
        self._next = max(self._next, epoch + 1)
        says = _stated_length(self.sampler)
        if says >= _ENDLESS:
            raise self._endless(f"{says:,}")
        most = max(_MOST_DRAWN, _MOST_PASSES * self._samples, says)
        # The same on every worker: seeded, and drawn by each for itself.
        drawn, count = list[Any](), 0
        with seeded(Domain.ORDER, self._seed, epoch):
            for one in self.sampler:
                drawn.append(one)
                count += len(one) if self.in_batches and isinstance(one, Sized) else 1
                if count > most:
                    raise self._endless(f"more than {most:,}")
        try:
            if not self.in_batches:
                return Drawn(indices=np.array([int(index) for index in drawn], dtype=np.int64))
            batches = [batch for batch in map(list, drawn) if batch]
            bounds = np.cumsum([0, *map(len, batches)], dtype=np.int64)
            indices = [int(index) for batch in batches for index in batch]
            return Drawn(indices=np.array(indices, dtype=np.int64), bounds=bounds)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the {self._name} gave something else than indices of samples: {error}"
            ) from error

    def _endless(self, count: str) -> DataError:
        return DataError(
            f"the {self._name} draws {count} samples, without an end: an epoch has to have one. "
            "Let it draw as many as a pass over the data has, and train for as many epochs as you "
            "need, s.epochs(...)"
        )


def _stated_length(sampler: object) -> int:
    """Give what `len` says; 0 where it can't say anything."""
    try:
        return len(sampler) if isinstance(sampler, Sized) else 0
    except Exception:  # noqa: BLE001  # a base class's, say, whose `__init__` nobody has called
        return 0
