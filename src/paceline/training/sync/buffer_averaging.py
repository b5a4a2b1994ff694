"""Averages running statistics (BatchNorm buffers) over all parts of a step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final

from torch import Tensor

from paceline.distributed.group import Group
from paceline.distributed.work_division import Division
from paceline.gradient_sync.buffers import PartBuffers, put
from paceline.gradient_sync.name_list import list_names
from paceline.training.components import Components


@final
class BufferAverager:
    """Keeps buffers for each part, and averages them for evaluations and snapshots.

    While training nothing of them is exchanged: evaluations and snapshots average them.
    """

    def __init__(
        self,
        components: Components,
        group: Group,
        division: Division,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Create the buffer averager.

        Args:
            components: The models; may still grow until the training begins.
            group: The workers.
            division: Which parts each of them has.
            warn: Shows a line to the user; None on workers that show nothing.
        """
        self._warn = warn
        self._components = components
        self._group = group
        self._division = division
        self._made: PartBuffers | None = None
        self._made_for = 0

    @property
    def _buffers(self) -> PartBuffers:
        models = self._components.models
        if self._made is None or self._made_for != len(models):
            own_parts = self._division.parts_of(self._group.rank)
            # Parts may lack samples in a short batch: then their counts of batches differ.
            integers = self._division.is_fixed or self._division.parts > 1
            self._made = PartBuffers(self._components.model, own_parts, with_integers=integers)
            self._made_for = len(models)
        return self._made

    def enter(self, part: int) -> None:
        """Switch the models to a part's buffers. Local to the worker."""
        self._buffers.enter(part)

    def own(self) -> Tensor:
        """Give this worker's, for an exchange: (most * K,) float64. Local to the worker."""
        return self._division.padded(self._buffers.rows())

    def gathered(self) -> Tensor:
        """Collect those of all parts: (parts, K) float64, the same on every worker. Collective."""
        own = self.own()
        if own.numel() == 0:
            return own.new_zeros(self._division.parts, 0)
        return self._division.in_order(self._group.gather_rows(own))

    def averaged(self, rows: Tensor) -> dict[str, Tensor]:
        """Average what `gathered` gave: buffers by name, on the CPU. Local to the worker."""
        self._warn_of_differing(rows)
        return self._buffers.averaged(rows)

    def _warn_of_differing(self, rows: Tensor) -> None:
        """Say once that a model's own buffers follow each worker's samples."""
        if self._warn is None or self._division.is_fixed or len(rows) == 1 or not rows.numel():
            return
        if names := self._buffers.name_differing(rows):
            self._warn(
                f"what is trained depends on the number of workers: the model changes "
                f"{list_names(names)} by the samples of a worker's own part of each batch, and "
                "only evaluations and snapshots take the average. The same on any number of "
                f"workers: --shards {len(rows)} (or more), or have the model add up over all "
                "workers what it changes them by, s.sum(...), or gather it, s.gather(...)"
            )
            self._warn = None

    def restore(self, rows: Tensor) -> None:
        """Give this worker's parts theirs back: (parts, K). Local to the worker."""
        own_parts = self._division.parts_of(self._group.rank)
        self._buffers.restore(rows[own_parts.start : own_parts.stop])

    def reset(self) -> None:
        """Start every part from what the models hold now. Local to the worker."""
        self._made = None

    @contextmanager
    def averaged_buffers(self) -> Iterator[None]:
        """Put into the models, for the block, the average of all parts. Collective on entry."""
        buffers = self._buffers
        live = buffers.live()
        own = {name: b.detach().clone() for name, b in live.items()}
        put(live, self.averaged(self.gathered()))
        try:
            yield
        finally:
            put(buffers.live(), own)
