"""Averages flat buffers over the workers in the background: own thread and process group.

Compressed buffers are sent in two stages. 1: each worker rounds its buffer and sends every worker a
slice of it (all-to-all); a slice's owner averages it in full precision. 2: it rounds the average,
and all collect the slices (all-gather). The bytes are those of a ring all-reduce.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.distributed.device import is_accelerator, use_device
from paceline.distributed.group import Group
from paceline.errors import UsageError
from paceline.gradient_sync.local_sgd.codec import BLOCK, codec_for
from paceline.gradient_sync.options import SyncPrecision
from paceline.gradient_sync.ordered.exchange import another_group
from paceline.gradient_sync.worker_thread import WorkerThread

_NAME = "average"


@final
@dataclass(kw_only=True)
class AverageInFlight:
    """A buffer that is being averaged."""

    sent: Tensor
    """(M,): what this worker holds; afterwards what the others know of it."""
    mean: Tensor
    """(M,): room, afterwards the workers' average difference."""
    anchor: Tensor
    """(M,): what the differences are taken to; not to be changed meanwhile."""
    owed: Tensor
    """(M / workers,): what rounding has taken from this worker's slice of the averages so far; it
    is added to the next one. Empty where nothing is rounded."""
    done: Future[None] | None = None
    """None where it has arrived already."""
    begun: torch.Event | None = None
    """On a GPU: all buffers are as they should be from here on."""
    ended: torch.Event | None = None
    """On a GPU: the average is there."""


@final
class LocalExchange:
    """Averages differences between workers.

    All workers start the same buffers in the same order, and wait for them in the same order.
    """

    def __init__(self, group: Group, precision: SyncPrecision) -> None:
        """Connect the workers, in a group of their own, and start the thread; `release` ends both.

        Collective.

        Raises:
            UsageError: The backend lacks what rounded numbers need.
        """
        self.sent_bytes = 0
        """What this worker has sent for averages, on the wire."""
        self._group = group
        self._workers = group.world_size
        self._codec = codec_for(precision)
        self._thread: WorkerThread | None = None
        self._sent: tuple[Tensor, ...] = ()
        """Of the last collectives, kept as `Group` does: a thread of the backend must not be the
        last to let go of a tensor."""
        self._lanes: dist.ProcessGroup | None = None
        self._stream: torch.Stream | None = None
        self._stalls: list[tuple[torch.Event, torch.Event]] = []
        """On a GPU: before and after it waits for an average; those that haven't been counted."""
        self._waited_s = 0.0
        if group.world_size == 1:
            return
        if group.has_few_operations:
            if self._codec is not None:
                raise UsageError(
                    f"--sync-precision {precision} needs all-to-all, which --backend "
                    f"{group.backend} doesn't have. Use --sync-precision fp32, or --backend nccl "
                    "or gloo"
                )
            return  # no further groups either: averages are waited for where they begin
        self._lanes = another_group(of_device=is_accelerator(group.device))
        # In a forked process the first to compute renews torch's pool of threads, and two at once
        # find none ("Invalid thread pool"): this thread is first.
        torch.set_num_threads(torch.get_num_threads())
        self._thread = WorkerThread("paceline-average")
        if is_accelerator(group.device):
            self._stream = torch.Stream(device=group.device)

    @property
    def multiple(self) -> int:
        """Of what the number of elements of a buffer has to be a multiple."""
        return 1 if self._codec is None else self._workers * BLOCK

    @property
    def waited_s(self) -> float:
        """How long steps have waited for averages, as far as a GPU is through with them."""
        while self._stalls and self._stalls[0][1].query():
            begun, ended = self._stalls.pop(0)
            self._waited_s += begun.elapsed_time(ended) / 1000
        return self._waited_s

    @property
    def owes(self) -> int:
        """By what the length of a buffer is divided to get that of what is owed; 0 for none."""
        return 0 if self._codec is None else self._workers

    def start(self, travel: AverageInFlight, *, rounded: bool = True) -> AverageInFlight:
        """Send a buffer on its way. Collective, but doesn't block.

        Args:
            travel: The buffers; no one may touch them before `finish`.
            rounded: In the precision that was asked for; otherwise in full, and what is owed is
                paid.
        """
        work = partial(self._average_rounded if rounded and self._codec else self._average, travel)
        # Without a thread the average is computed here and now.
        if self._thread is None:
            began_s = perf_counter()
            work()
            self._waited_s += perf_counter() - began_s
            return travel
        if self._stream is not None:
            travel.begun = torch.Event(device=self._group.device)
            travel.begun.record()
            work = partial(self._on_stream, self._stream, travel, work)
        travel.done = self._thread.send(work)
        return travel

    def finish(self, travel: AverageInFlight, *, in_step: bool = False) -> None:
        """Wait until a buffer has arrived. Collective.

        Args:
            travel: What `start` gave.
            in_step: Whether the wait counts as a step's.

        Raises:
            Exception: What went wrong on the way: a worker is gone, for example.
        """
        # The thread's part: its collectives have been issued, on the CPU they are complete.
        if travel.done is not None:
            began_s, listener = perf_counter(), self._group.listener
            if listener is not None:
                listener.enter(_NAME)
            travel.done.result()
            if listener is not None:
                listener.leave()
            self._waited_s += perf_counter() - began_s if in_step else 0.0
        # The GPU's part: its queue waits, this thread does not.
        if travel.ended is not None:
            self._wait_on_device(travel.ended, in_step=in_step)
        travel.done = travel.begun = travel.ended = None

    def release(self) -> None:
        """End the thread and leave its group. Local to the worker."""
        ended = self._thread is None or self._thread.end()
        # NCCL would wait here for what others may never enter; on devices the group of all workers
        # ends this one as well.
        on_host = not is_accelerator(self._group.device)
        if ended and on_host and self._lanes is not None and dist.is_initialized():
            dist.destroy_process_group(self._lanes)
        self._thread = self._lanes = None

    def _wait_on_device(self, arrived: torch.Event, *, in_step: bool) -> None:
        device = self._group.device
        begun, ended = (torch.Event(device=device, enable_timing=True) for _ in range(2))
        begun.record()
        torch.accelerator.current_stream().wait_event(arrived)
        ended.record()
        if in_step:
            self._stalls.append((begun, ended))

    def _on_stream(
        self, stream: torch.Stream, travel: AverageInFlight, work: Callable[[], None]
    ) -> None:
        assert travel.begun is not None
        use_device(self._group.device)
        with stream:
            stream.wait_event(travel.begun)
            work()
            ended = torch.Event(device=self._group.device)
            ended.record()
        travel.ended = ended

    def _average(self, travel: AverageInFlight) -> None:
        mean = torch.sub(travel.sent, travel.anchor, out=travel.mean)
        # Rounding errors so far belong to the mean; the all-reduce divides by the number of
        # workers.
        if travel.owed.numel():
            own = mean.view(self._workers, -1)[self._group.rank]
            own.add_(travel.owed, alpha=self._workers)
            travel.owed.zero_()
        if self._workers > 1:
            dist.all_reduce(mean, group=self._lanes)
            mean.div_(self._workers)
            self._count(mean.nbytes)

    def _average_rounded(self, travel: AverageInFlight) -> None:
        codec, workers = self._codec, self._workers
        assert codec is not None
        # What others will decode, errors included, counts as sent: phase 4 then keeps what was
        # rounded off.
        rows = codec.encode((travel.sent - travel.anchor).view(workers, -1))  # (workers, E)
        torch.add(travel.anchor, codec.decode(rows).view(-1), out=travel.sent)
        received = torch.empty_like(rows)
        if workers == 1:
            received = rows
        else:  # stage 1
            dist.all_to_all_single(received.view(-1), rows.view(-1), group=self._lanes)
        # The owner of a slice averages it in full precision, and adds what rounding took from it
        # before.
        own = codec.decode(received).sum(0).div_(workers).add_(travel.owed)  # (slice,)
        row = codec.encode(own.unsqueeze(0))  # (1, E)
        # Error feedback: what this rounding takes is owed to the next average.
        torch.sub(own, codec.decode(row).view(-1), out=travel.owed)
        if workers == 1:
            rows = row
        else:  # stage 2
            dist.all_gather_into_tensor(rows.view(-1), row.view(-1), group=self._lanes)
        travel.mean.copy_(codec.decode(rows).view(-1))
        self._sent = (rows, row, received)
        self._count(rows.nbytes)

    def _count(self, total: int) -> None:
        """Count what a worker sends of so many bytes that travel all around."""
        self.sent_bytes += 2 * total * (self._workers - 1) // self._workers
