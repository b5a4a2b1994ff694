"""The loaders of a session: iterate them as a torch DataLoader."""

from collections.abc import Callable, Generator, Iterator, Mapping
from typing import cast, final

import torch
from torch.utils.data import RandomSampler, Sampler, SequentialSampler

from paceline.data.batch import Batch, BatchSource
from paceline.data.loading.dataset_worker import Collate
from paceline.distributed.work_division import Division, share
from paceline.training.batches.plan import TrainPlan
from paceline.training.batches.sources import DataSource
from paceline.training.hooks.observer import OBSERVER

Open = Callable[[], BatchSource]

_MIN_EVAL_BATCH = 64


class _Reader:
    """What both kinds of loaders have: their source, and a torch DataLoader's description of it."""

    def __init__(self, open_source: Open, served: DataSource) -> None:
        """Create the reader.

        Args:
            open_source: Opens the source when the first batch is asked for.
            served: What the script has said about the data.
        """
        self.served = served
        self._open = open_source
        self._source: BatchSource | None = None

    @property
    def source(self) -> BatchSource:
        """Where the batches come from; opened when it is first needed."""
        if self._source is None:
            self._source = self._open()
        return self._source

    @source.setter
    def source(self, source: BatchSource) -> None:
        self._source = source

    @property
    def is_open(self) -> bool:
        """Whether batches have been asked for."""
        return self._source is not None

    @property
    def dataset(self) -> object:
        """The data set, whole: `len(loader.dataset)` is its size over all workers."""
        return self.served.data

    @property
    def num_workers(self) -> int | None:
        """Reader processes as the script's DataLoader has them; None: `--loader-workers`."""
        return self.served.loader_workers

    @property
    def collate_fn(self) -> Collate:
        """What makes a batch of samples."""
        return self.served.collate

    def close(self) -> None:
        """End reader processes."""
        if self._source is not None:
            self._source.close()


@final
class Loader(_Reader):
    """Training batches: this worker's share of every global batch, one pass an epoch.

    The order is that of one process, whatever the number of workers: nothing is padded, dropped or
    seen twice, but by a sampler that does so. Batches are on the device.
    """

    def __init__(
        self,
        open_source: Open,
        served: DataSource,
        plan: TrainPlan,
        seed: int,
        rank: int,
        drive: "Drive | None",
    ) -> None:
        """Create the loader.

        Args:
            open_source: Opens the source when the first batch is asked for.
            served: What the script has said about the data.
            plan: How an epoch is cut.
            seed: Settles the order.
            rank: This worker.
            drive: Runs a pass for the session whose steps are counted by this loader; None for any
                further loader, which keeps its own count.
        """
        super().__init__(open_source, served)
        self.plan = plan
        self._seed = seed
        self._rank = rank
        self._drive = drive
        self._epoch = self._step = 0
        self._newest_pass: object = None
        """Which of its own passes is counted."""
        self._is_restored = False
        """Whether the next of its own passes goes on where a snapshot's was."""

    @property
    def batch_size(self) -> int:
        """Samples of one step over all workers: the global batch."""
        return self.plan.global_batch

    @property
    def drop_last(self) -> bool:
        """Whether the short batch at the end of an epoch is left out."""
        return self.plan.drop_last

    @property
    def sampler(self) -> Sampler[int]:
        """The samples of an epoch as one process draws them; `len` is their number.

        The session's own order is another, the same on any number of workers.
        """
        if self.served.order is not None and not self.served.order.in_batches:
            return cast(Sampler[int], self.served.order.sampler)
        data = range(self.served.num_samples())
        return RandomSampler(data) if self.plan.shuffle else SequentialSampler(data)

    def __len__(self) -> int:
        """Count the steps of an epoch.

        Raises:
            TypeError: It reads a stream, whose length isn't known.
        """
        if not self.plan.steps_per_epoch:
            raise TypeError("a stream has no length: nobody knows how many batches it gives")
        return self.plan.steps_per_epoch

    def __iter__(self) -> Iterator[object]:
        """Give the batches of an epoch as the data set makes them."""
        return (batch.content for batch in self.batches())

    def batches(self) -> Iterator[Batch]:
        """Give the batches of an epoch with their sample numbers and weights."""
        if self._drive is not None:
            return self._drive(self)
        return self._own_pass()

    def read(self, epoch: int, first_step: int) -> Iterator[Batch]:
        """Give the batches of one epoch from a step on."""
        part = self.plan.epoch(self._seed, epoch, first_step, self._rank)
        batches, observer = self.source.train_batches(part), OBSERVER.get()
        return batches if observer is None else observer.epoch(epoch, batches)

    def read_ahead(self, epoch: int) -> None:
        """Let loader processes start reading an epoch."""
        self.source.read_ahead(self.plan.epoch(self._seed, epoch, 0, self._rank))

    def state_dict(self) -> Mapping[str, object]:
        """Give the position of a loader that keeps its own count."""
        return {"epoch": self._epoch, "step": self._step}

    def load_state_dict(self, state_dict: dict[str, object], /) -> None:
        """Go on from a position: the next pass continues the one that was open."""
        self._epoch, self._step = int(str(state_dict["epoch"])), int(str(state_dict["step"]))
        self._is_restored = True

    def _own_pass(self) -> Iterator[Batch]:
        # Here and not with its first batch: a `zip` whose first loader has ended asks for none.
        self._newest_pass = own = object()
        goes_on, self._is_restored = self._is_restored, False
        return self._batches_of(own, goes_on=goes_on)

    def _batches_of(self, own: object, *, goes_on: bool) -> Iterator[Batch]:
        # As in PyTorch each `iter` begins a pass, wherever the one before was left: a `zip` leaves
        # the second loader's without a batch left, or with some. Only a resumed one goes on.
        goes_on, self._is_restored = goes_on or self._is_restored, False
        if self._step and not goes_on:
            self._epoch, self._step = self._epoch + 1, 0
        try:
            for batch in self.read(self._epoch, self._step):
                if self._newest_pass is own:
                    # One step has several batches where there are shards.
                    self._step += batch.last
                # A stand-in keeps a worker in the others' backward pass; where nothing is trained,
                # in an evaluation by hand, it would count a sample twice.
                if batch.local or torch.is_grad_enabled():
                    yield batch
        finally:
            # Also where the script has left the loop: a snapshot behind it begins the next pass.
            if self._newest_pass is own:
                self._epoch, self._step = self._epoch + 1, 0


def eval_batch_size(given: int | None, plan: TrainPlan | None, most: int | None) -> int:
    """Choose one worker's batch to evaluate with: without gradients more fits than in training.

    Args:
        plan: Of the training batches, where they are known.
    """
    size = given or (max(2 * plan.micro_batch, _MIN_EVAL_BATCH) if plan else _MIN_EVAL_BATCH)
    return min(size, most or size)


Drive = Callable[[Loader], Iterator[Batch]]


@final
class EvalLoader(_Reader):
    """Batches to evaluate on: this worker's contiguous share of all samples, each exactly once.

    Over all workers nothing is padded or dropped, so that workers may have unequal numbers of
    batches: no collective belongs inside the loop.
    """

    def __init__(
        self,
        open_source: Open,
        served: DataSource,
        batch_size: int,
        rank: int,
        division: Division,
        check: Callable[[], None],
    ) -> None:
        """Create the eval loader.

        Args:
            open_source: Opens the source when the first batch is asked for.
            served: What the script has said about the data.
            batch_size: Samples of one worker's batch.
            rank: This worker.
            division: Which parts of the samples each worker has.
            check: Called before each batch that the script gets.
        """
        super().__init__(open_source, served)
        self.batch_size = batch_size
        self.is_running = False
        """Whether a pass is under way."""
        self._own_parts = division.parts_of(rank)
        self._parts = division.parts
        self._check = check

    @property
    def num_samples(self) -> int:
        """Samples over all workers."""
        return self.source.num_samples

    @property
    def drop_last(self) -> bool:
        """Whether samples are left out: none are."""
        return False

    @property
    def sampler(self) -> Sampler[int]:
        """All samples in their own order; `len` is their number over all workers."""
        return SequentialSampler(range(self.served.num_samples()))

    def __len__(self) -> int:
        """Count the batches that a loop gives on this worker.

        Raises:
            TypeError: It reads a stream, whose length isn't known.
        """
        if self.served.is_stream:
            raise TypeError("a stream has no length: nobody knows how many batches it gives")
        total = self.served.num_samples()
        bounds = (share(total, part, self._parts) for part in self._own_parts)
        return sum(-(-(stop - start) // self.batch_size) for start, stop in bounds)

    def __iter__(self) -> Iterator[object]:
        """Give the batches as the data set makes them.

        Raises:
            UsageError: One is for a step of the training.
        """
        for batch in self.batches():
            self._check()
            yield batch.content

    def batches(self) -> Generator[Batch]:
        """Give the batches with their sample numbers."""
        self.is_running = True
        try:
            for part in self._own_parts:
                for batch in self.source.eval_batches(part, self._parts, self.batch_size):
                    batch.part = part
                    yield batch
        finally:
            self.is_running = False
