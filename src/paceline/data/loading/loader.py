"""Batches of any map-style data set, read by a torch DataLoader with processes of its own."""

import multiprocessing
import signal
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import cast

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from paceline.data.batch import Batch, BatchSource, laid_out
from paceline.data.fingerprint import describe_state
from paceline.data.loading.dataset_worker import (
    Collate,
    ItemRequest,
    SeededItems,
    WorkerInit,
    shorten,
    start_loader_process,
    start_method,
)
from paceline.data.loading.device_feed import DeviceFeed
from paceline.data.loading.sampled import SampledOrder
from paceline.data.order import (
    EpochPlan,
    Indices,
    StepShare,
    own_shares,
    plan_order,
    plan_shares,
)
from paceline.data.protocols import MapDataset
from paceline.distributed.work_division import share
from paceline.errors import InfrastructureError, PacelineError, UsageError
from paceline.launch.process_tree import spare_children_our_garbage

_EVAL_EPOCH = -1
"""Seeds of evaluation differ from those of every epoch."""
_END = object()
_END_S = 5.0
_PREFETCHED = 2
"""Batches that each process keeps ready."""
_REASONS = {
    signal.SIGKILL: "The kernel kills processes when memory runs out: "
    "use fewer --loader-workers, or hold less in memory per sample",
    signal.SIGBUS: "Shared memory (/dev/shm) is probably full: "
    "enlarge it (for containers: --shm-size), or use fewer --loader-workers",
}


@dataclass(frozen=True, slots=True)
class _Work:
    """A batch that was requested from the loader processes."""

    request: ItemRequest
    indices: Indices
    total: int
    last: bool = True
    part: int = 0


class _Requests:
    """The DataLoader's batch sampler: hands out the work of the current pass, and remembers it."""

    def __init__(self) -> None:
        self._work: Iterator[_Work] = iter(())
        self.in_flight: deque[_Work] = deque()

    def start(self, work: Iterator[_Work]) -> None:
        """Begin a pass; what was in flight of the one before is forgotten."""
        self._work = work
        self.in_flight.clear()

    def __iter__(self) -> Iterator[ItemRequest]:
        for work in self._work:
            self.in_flight.append(work)
            yield work.request


class LoaderSource(BatchSource):
    """Batches of a user's data set. Random transforms give the same on any number of processes."""

    def __init__(
        self,
        dataset: MapDataset,
        device: torch.device | str = "cpu",
        *,
        loader_workers: int = 2,
        memory_format: torch.memory_format = torch.contiguous_format,
        collate: Collate = default_collate,
        timeout_s: float = 600.0,
        order: SampledOrder | None = None,
        worker_init: WorkerInit | None = None,
    ) -> None:
        """Prepare the loader; its processes are started with the first batch, and kept.

        They are started anew where the data set's attributes have changed before a pass: they have
        a copy of it.

        Args:
            dataset: Map-style; items are (input, target) pairs that `collate` turns into tensors.
            loader_workers: Processes that read; 0 reads in this process, while the device waits.
            memory_format: `torch.channels_last` lays four-dimensional inputs out so.
            collate: Makes (inputs, targets) tensors of a list of items.
            timeout_s: A batch that takes longer is an error.
            order: By which samples are drawn instead of each once an epoch, in evaluations too.
            worker_init: A DataLoader's `worker_init_fn`: called in each process that reads.

        Raises:
            UsageError: The data set isn't map-style.
        """
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise UsageError(
                f"{type(dataset).__name__} is not a map-style data set: it needs __getitem__ and "
                "__len__, so that every sample can be seen exactly once"
            )
        self._dataset = dataset
        self._order = order
        self._feed = DeviceFeed(torch.device(device))
        self._channels_last = memory_format == torch.channels_last
        self._loader_workers = loader_workers
        self._requests = _Requests()
        # Called again where the processes' copies of the data set are out of date.
        self._make = partial(
            _make_loader,
            SeededItems(dataset, collate),
            self._requests,
            loader_workers,
            pin_memory=self._feed.is_beside,
            timeout_s=timeout_s,
            worker_init=worker_init,
        )
        self._loader: DataLoader[object] | None = self._make()
        self._state: tuple[object, ...] = ()
        """What the processes' copies of the data set have in their attributes."""
        self._running: Iterator[object] | None = None
        self._passes = 0
        self._ahead: tuple[EpochPlan, int] | None = None
        """The epoch that is being read ahead, and the number of its pass."""
        self._processes: list[BaseProcess] = []

    @property
    def num_samples(self) -> int:
        """Samples of a pass: all of the data set, or those that are drawn."""
        return len(self._dataset if self._order is None else self._order)

    def train_batches(self, plan: EpochPlan) -> Iterator[Batch]:
        """Give the batches of one epoch; reading begins with the first one asked for.

        Raises:
            DataError: The data set raised, or its items are no (input, target) pairs.
            InfrastructureError: A loader process died or hung.
        """
        ahead, self._ahead = self._ahead, None
        if ahead == (plan, self._passes) and describe_state(self._dataset) == self._state:
            return self._pass()
        return self._batches(self._training(plan))

    def read_ahead(self, plan: EpochPlan) -> None:
        """Let the loader processes start reading an epoch; nothing if there are none."""
        if self._loader_workers:
            self._start(self._training(plan))
            self._ahead = plan, self._passes

    def eval_batches(self, part: int, parts: int, batch_size: int) -> Iterator[Batch]:
        """Give one part's contiguous share in order; raises as `train_batches`."""
        order = self._order
        samples = np.arange(len(self._dataset)) if order is None else order.first.indices
        return self._batches(_evaluation_work(samples, part, parts, batch_size))

    def describe(self) -> str:
        """Say what is read by how many processes."""
        name = type(self._dataset).__name__
        count = self._loader_workers
        readers = f"{count} loader processes per worker" if count else "read in each worker"
        return f"{name}: {self.num_samples:,} samples, {readers}{self._feed.describe()}"

    def close(self) -> None:
        """End the loader processes; those that don't end within seconds are killed."""
        # A pass that somebody still iterates over ends with an error, instead of reading on.
        self._passes += 1
        self._end_processes()

    def _end_processes(self) -> None:
        running, self._running = self._running, None
        self._loader = None
        if isinstance(running, _MultiProcessingDataLoaderIter):
            # Dropping the last reference does the same, but a traceback may hold one more.
            running._shutdown_workers()
        for process in self._processes:
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes = []

    def _training(self, plan: EpochPlan) -> Iterator[_Work]:
        if self._order is None:
            order = plan_order(plan, self.num_samples)
            return _training_work(plan, order, plan_shares(plan, len(order)))
        drawn = self._order.of(plan.epoch)
        order, bounds = drawn.indices, drawn.bounds
        shares = plan_shares(plan, len(order)) if bounds is None else own_shares(plan, bounds)
        return _training_work(plan, order, shares)

    def _batches(self, work: Iterator[_Work]) -> Iterator[Batch]:
        """Run one pass; a later pass of the same source ends this one."""
        self._start(work)
        yield from self._pass()

    def _pass(self) -> Iterator[Batch]:
        """Give the batches of the pass that has begun."""
        this_pass = self._passes
        while True:
            if this_pass != self._passes:
                raise RuntimeError(
                    "another pass over this source has begun; only one runs at a time"
                )
            collated = self._next()
            if collated is _END:
                return
            batch = self._to_batch(collated, self._requests.in_flight.popleft())
            del collated  # see DeviceFeed
            yield batch

    def _start(self, work: Iterator[_Work]) -> None:
        if self._loader is None:
            raise RuntimeError("this source is closed")
        self._passes += 1
        if self._loader_workers:
            state = describe_state(self._dataset)
            if self._processes and state != self._state:
                self._end_processes()
                self._loader = self._make()
            self._state = state
        spare_children_our_garbage()
        self._requests.start(work)
        # torch doesn't name the processes of a loader: they are those that are new afterwards.
        before = set(multiprocessing.active_children())
        with _usual_warnings_off():
            self._running = iter(self._loader)
        self._processes += set(multiprocessing.active_children()) - before

    def _next(self) -> object:
        """Wait for the next collated batch; `_END` after the last."""
        assert self._running is not None
        try:
            return next(self._running, _END)
        except PacelineError:
            raise
        except (RuntimeError, OSError, EOFError) as error:
            raise self._process_error(error) from error

    def _process_error(self, error: Exception) -> InfrastructureError:
        """Say which loader process failed, and what was being read."""
        # What was asked for and hasn't come: one of these samples was being read.
        samples = [index for work in self._requests.in_flight for index in work.request.indices]
        reading = f"while the samples {shorten(samples)} were read"
        ended = wait([process.sentinel for process in self._processes], timeout=1.0)
        for process in self._processes:
            if process.sentinel in ended:
                return InfrastructureError(_describe_death(process, reading))
        pids = ", ".join(str(process.pid) for process in self._processes)
        return InfrastructureError(f"no batch from the loader processes {pids} {reading}: {error}")

    def _to_batch(self, collated: object, work: _Work) -> Batch:
        content = laid_out(self._feed.bring(collated), channels_last=self._channels_last)
        return Batch(content, len(work.indices), work.total, work.indices, work.last, work.part)


def _make_loader(
    items: SeededItems,
    requests: _Requests,
    loader_workers: int,
    *,
    pin_memory: bool,
    timeout_s: float,
    worker_init: WorkerInit | None = None,
) -> DataLoader[object]:
    parallel = loader_workers > 0
    with _usual_warnings_off():
        return DataLoader(
            cast(Dataset[object], items),
            batch_sampler=requests,  # type: ignore[arg-type]  # typed for lists of indices only
            collate_fn=_unchanged,
            num_workers=loader_workers,
            prefetch_factor=_PREFETCHED if parallel else None,
            persistent_workers=parallel,
            pin_memory=pin_memory,
            timeout=timeout_s if parallel else 0,
            worker_init_fn=partial(start_loader_process, then=worker_init),
            multiprocessing_context=start_method() if parallel else None,
            generator=torch.Generator(),  # else each pass draws from the training's own one
        )


@contextmanager
def _usual_warnings_off() -> Iterator[None]:
    """Silence two warnings at the start of loader processes.

    Torch's about more processes than cores: the number is the user's choice, readers often wait
    for a disk. Python 3.12's about forking with threads: see `start_method`.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This DataLoader will create")
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        yield


def _unchanged(batch: object) -> object:
    return batch


def _training_work(plan: EpochPlan, order: Indices, shares: Iterator[StepShare]) -> Iterator[_Work]:
    """List an epoch's batches."""
    for step_share in shares:
        indices = order[step_share.start : step_share.stop]
        start, stop = step_share.to_read
        request = ItemRequest(plan.seed, plan.epoch, start, tuple(order[start:stop].tolist()))
        yield _Work(request, indices, step_share.total, step_share.last, step_share.part)


def _evaluation_work(samples: Indices, part: int, parts: int, batch_size: int) -> Iterator[_Work]:
    begin, end = share(len(samples), part, parts)
    for start in range(begin, end, batch_size):
        indices = samples[start : min(start + batch_size, end)]
        request = ItemRequest(0, _EVAL_EPOCH, start, tuple(indices.tolist()))
        yield _Work(request, indices, len(indices))


def _describe_death(process: BaseProcess, reading: str) -> str:
    # A negative exit code is the number of the signal.
    code = process.exitcode or 0
    if code < 0:
        number = signal.Signals(-code)
        cause = f"by the signal {number.name}"
        hint = _REASONS.get(number, "A library that the data set uses has probably crashed")
    else:
        cause = f"with exit code {code}"
        hint = "Its output is in this worker's log"
    return f"loader process {process.pid} ended {cause} {reading}. {hint}"
