"""The order in which a script's own sampler draws samples, the same on every worker."""

import zlib
from collections.abc import Iterable
from functools import cached_property
from typing import final

import numpy as np

from paceline.data.loading.dataset_worker import seeded
from paceline.data.order import Indices
from paceline.data.splitmix import Domain
from paceline.errors import DataError


@final
class SampledOrder:
    """Draws each epoch's samples as one process would, on every worker by itself.

    The default generators are seeded by (seed, epoch) for it. What a sampler keeps itself (a
    generator, a count of epochs) comes to where it was by drawing all epochs before, which a
    resumed training does anew; one with a method `set_epoch` needs none of them.
    """

    def __init__(self, sampler: Iterable[int], seed: int) -> None:
        """Args:
        sampler: The script's; draws alike on every worker.
        seed: The training's.
        """
        self.sampler = sampler
        self._seed = seed
        self._next = 0
        self._last: tuple[int, Indices] = (-1, np.empty(0, np.int64))

    @cached_property
    def first(self) -> Indices:
        """What epoch 0 draws; evaluations go through the same."""
        return self._draw(0)

    def __len__(self) -> int:
        """Count the samples of an epoch."""
        return len(self.first)

    @property
    def checksum(self) -> str:
        """Sum up what epoch 0 draws, to be compared between workers."""
        return f"{len(self.first)} samples, {zlib.crc32(self.first.tobytes()):08x}"

    def of(self, epoch: int) -> Indices:
        """Draw the samples of an epoch: (len(self),), the same each time it is asked for.

        Raises:
            DataError: They aren't as many as in the first epoch, or no indices.
        """
        if epoch == 0:
            return self.first
        if self._last[0] != epoch:
            expected = len(self.first)
            set_epoch = getattr(self.sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            else:
                for passed in range(self._next, epoch):
                    self._draw(passed)
            self._last = epoch, self._draw(epoch)
            if len(self._last[1]) != expected:
                raise DataError(
                    f"the {self._name} drew {len(self._last[1]):,} samples in epoch {epoch + 1} "
                    f"and {expected:,} in the first: every epoch has as many steps, so draw as "
                    "many samples in each"
                )
        return self._last[1]

    @property
    def _name(self) -> str:
        return type(self.sampler).__name__

    def _draw(self, epoch: int) -> Indices:
        self._next = max(self._next, epoch + 1)
        with seeded(Domain.ORDER, self._seed, epoch):
            drawn = list(self.sampler)
        try:
            return np.array([int(index) for index in drawn], dtype=np.int64)
        except (TypeError, ValueError) as error:
            raise DataError(
                f"the {self._name} gave something else than indices of samples: {error}"
            ) from error
