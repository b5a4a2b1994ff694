"""Batches of a torch IterableDataset: one stream of samples, dealt out to the workers.

Every worker reads the whole stream and keeps its own share, since nobody else knows where a share
begins. The global order is then that of one process, on any number of workers.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from paceline.data.batch import Batch, BatchSource, laid_out
from paceline.data.loading.dataset_worker import Collate, seeded
from paceline.data.loading.device_feed import DeviceFeed
from paceline.data.order import EpochPlan, Indices, step_shares
from paceline.data.splitmix import Domain
from paceline.distributed.group import Group
from paceline.errors import DataError

_SET_EPOCH = (
    "Let its order and its random numbers follow from the epoch alone, which it is told by its "
    "method set_epoch(epoch)"
)
_EVAL_EPOCH = -1
"""Seeds of evaluation differ from those of every epoch."""


@final
@dataclass(frozen=True, kw_only=True)
class StreamRecord:
    """What a stream has given, summed up: kept in snapshots, to be compared with once resumed."""

    epoch: int = 0
    seen: int = 0
    """Checksum of the first sample of each step of this epoch."""
    steps: int = 0
    """How many these are."""
    first: int | None = None
    """Checksum of the first batch of epoch 0; None where it wasn't seen."""
    changes: bool = False
    """Whether a later epoch has begun with other samples."""


@final
class StreamSource(BatchSource):
    """Batches of a stream. Its methods exchange a few bytes a batch with the other workers.

    So that workers whose streams differ are an error that says so, not wrong gradients or a hang.
    """

    def __init__(
        self,
        dataset: IterableDataset[object],
        group: Group,
        *,
        memory_format: torch.memory_format = torch.contiguous_format,
        collate: Collate = default_collate,
    ) -> None:
        """Create the stream source.

        Args:
            dataset: Gives the same samples in the same order on every worker.
            group: The workers.
            memory_format: `torch.channels_last` lays four-dimensional inputs out so.
            collate: Makes a batch of a list of items.
        """
        self._dataset = dataset
        self._group = group
        self._feed = DeviceFeed(group.device)
        self._channels_last = memory_format == torch.channels_last
        self._collate = collate
        self.record = StreamRecord()
        self._report: Callable[[str], None] | None = None
        """Where it is to be told once whether the stream gives again what it gave before."""

    def resume(self, record: StreamRecord, report: Callable[[str], None]) -> None:
        """Compare what is read next with what was read before the training was resumed. Local.

        Args:
            report: Called with what the user has to know, if the stream gives other samples now.
        """
        self.record, self._report = record, report

    @property
    def num_samples(self) -> int:
        """0: the length of a stream is unknown."""
        return 0

    def train_batches(self, plan: EpochPlan) -> Iterator[Batch]:
        """Give the batches of one epoch. Collective with every batch.

        A later `first_step` reads what comes before and leaves it out.
        A data set with a method `set_epoch` is told the epoch.

        Raises:
            DataError: The workers' streams differ.
        """
        set_epoch = getattr(self._dataset, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(plan.epoch)
        samples = iter(self._dataset)
        before, self.record = self.record, replace(self.record, epoch=plan.epoch, seen=0, steps=0)
        start = plan.first_step * plan.global_batch
        # A stream can't be indexed: to go on within an epoch, read and drop what came before.
        read = 0
        for _ in range(plan.first_step):
            items = list(islice(samples, plan.global_batch))
            read += len(items)
            if items:
                self._note(_checksum(items[0]))
        self._compare_again(before, plan)
        # The last step may have been a short one: then it ends within it.
        if read < start and read <= start - plan.global_batch:
            raise DataError(
                f"{self.describe()}: it ended after {read} samples, before the step "
                f"{plan.first_step} that this epoch had reached; to resume within an epoch it has "
                "to give the same samples again"
            )
        while True:
            # Every worker reads the whole global batch, checks that all read the same, and keeps
            # its share.
            items = list(islice(samples, plan.global_batch))
            first = _checksum(items[0]) if items else 0
            self._compare(len(items), first, start)
            if not items or (plan.drop_last and len(items) < plan.global_batch):
                return
            if not start:
                self._begin(items, plan.epoch)
            self._note(first)
            for step_share in step_shares(replace(plan, global_batch=len(items)), len(items), 0):
                own_items = items[slice(*step_share.to_read)]
                indices = np.arange(
                    start + step_share.start, start + step_share.stop, dtype=np.int64
                )
                key = plan.seed, plan.epoch, start + step_share.start
                batch = self._batch(own_items, key, len(indices), len(items), indices)
                batch.last, batch.part = step_share.last, step_share.part
                yield batch
            start += len(items)

    def read_ahead(self, plan: EpochPlan) -> None:
        """Do nothing: each worker reads the stream itself, with exchanges that the others join."""

    def eval_batches(self, part: int, parts: int, batch_size: int) -> Iterator[Batch]:
        """Give every part's batches of the stream: batch i belongs to part i modulo parts."""
        samples = iter(self._dataset)
        for number in count():
            items = list(islice(samples, batch_size))
            if not items:
                return
            if number % parts == part:
                first = number * batch_size
                indices = np.arange(first, first + len(items), dtype=np.int64)
                key = 0, _EVAL_EPOCH, first
                yield self._batch(items, key, len(items), len(items), indices)

    def describe(self) -> str:
        """Say what is read."""
        name = type(self._dataset).__name__
        return f"{name}, a stream that every worker reads whole{self._feed.describe()}"

    def close(self) -> None:
        """Nothing to end: there are no reader processes."""

    def _note(self, checksum: int) -> None:
        """Sum up a step's samples by the first of them."""
        seen = zlib.crc32(checksum.to_bytes(4), self.record.seen)
        self.record = replace(self.record, seen=seen, steps=self.record.steps + 1)

    def _compare_again(self, before: StreamRecord, plan: EpochPlan) -> None:
        """Compare what was read again of an epoch with what was read of it before."""
        if self._report is None or not plan.first_step:
            return
        is_same_part = (before.epoch, before.steps) == (plan.epoch, plan.first_step)
        if is_same_part and before.seen != self.record.seen:
            self._report(
                f"{self.describe()}: read again after a resume it gives other samples than before, "
                f"so that epoch {plan.epoch + 1} isn't that of an uninterrupted training. "
                f"{_SET_EPOCH}"
            )
        self._report = None

    def _begin(self, items: list[object], epoch: int) -> None:
        """Note an epoch's first batch, and compare it with that of the first one."""
        head, record = _checksum(items), self.record
        if epoch == 0:
            self.record = replace(record, first=head)
        elif record.first is not None and head != record.first:
            self.record = replace(record, changes=True)
        elif record.changes and self._report is not None:
            self._report(
                f"{self.describe()}: resumed, it begins epoch {epoch + 1} with the samples of its "
                f"first epoch, so that this isn't that of an uninterrupted training. {_SET_EPOCH}"
            )
        self._report = None

    def _batch(
        self,
        items: list[object],
        key: tuple[int, int, int],
        local: int,
        total: int,
        indices: Indices,
    ) -> Batch:
        with seeded(Domain.COLLATE, *key):
            collated = self._collate(items)
        content = laid_out(self._feed.bring(collated), channels_last=self._channels_last)
        return Batch(content, local, total, indices)

    def _compare(self, samples: int, checksum: int, start: int) -> None:
        """Raise an error if the workers have read different samples. Collective."""
        if self._group.world_size == 1:
            return
        rows = self._group.gather_rows(torch.tensor([samples, checksum])).tolist()
        if any(row != rows[0] for row in rows):
            read = ", ".join(f"rank {rank} has {length}" for rank, (length, _) in enumerate(rows))
            raise DataError(
                f"{self.describe()}: from sample {start} on the workers read different samples "
                f"({read}). It must give every worker the same samples in the same order: seed its "
                "random numbers, and leave the sharding to Paceline"
            )


def _checksum(item: object) -> int:
    """Sum an item up in 32 bits; what isn't a tensor or plain value counts by its type alone."""
    if isinstance(item, Tensor):
        return zlib.crc32(
            item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        )
    if isinstance(item, dict):
        return _checksum(list(item.values()))
    if isinstance(item, tuple | list):
        return zlib.crc32(repr([_checksum(value) for value in item]).encode())
    if isinstance(item, np.ndarray):
        return zlib.crc32(item.tobytes())
    plain = isinstance(item, str | int | float | bytes)
    return zlib.crc32(repr(item if plain else type(item)).encode())
