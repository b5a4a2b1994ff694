"""Copies batches from host to device asynchronously, on a stream of their own."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar, final

import torch
from torch import Tensor

from paceline.data.batch import map_tensors, move_whole
from paceline.distributed.device import can_pin, is_accelerator, use_device

T = TypeVar("T")
Made = TypeVar("Made")


@dataclass(frozen=True, slots=True)
class BatchInFlight:
    """A batch that is being copied."""

    content: object
    arrived: torch.Event | None
    """None where there was nothing to wait for."""


@final
class DeviceFeed:
    """Copies batches to a device on a stream of their own, from pinned memory.

    A copy on the stream that computes would begin when the step before is over; from ordinary
    memory it would keep the training thread waiting as well. Without such copies (on CPUs) a batch
    is moved at once.

    Who uses one drops what was copied, and what it was copied from, before a step begins. An error
    in the step takes the generators of batches apart; torch (2.11) gives back memory that several
    streams have used by events, which a GPU that has failed refuses, and aborts the process then:
    nobody would see the error.
    """

    def __init__(self, device: torch.device) -> None:
        """Create the device feed.

        Args:
            device: Where batches go.
        """
        self._device = device
        self.is_beside = can_pin(device)
        """Whether copies run beside the device's work."""
        self._stream: torch.Stream | None = None

    def start(self, content: object) -> BatchInFlight:
        """Begin to copy a batch; on any thread.

        Args:
            content: Tensors of the host, as `Batch.content` has them. What moves itself is moved by
                `finish`: where it puts tensors, and for how long, is its own affair.
        """
        if not self.is_beside:
            return BatchInFlight(map_tensors(content, self._moved, _unchanged), None)
        self._stream = self._stream or torch.Stream(device=self._device)
        with self._stream:
            moved = map_tensors(content, lambda tensor: self._moved(_pinned(tensor)), _unchanged)
            return BatchInFlight(moved, self._stream.record_event())

    def finish(self, in_flight: BatchInFlight) -> object:
        """Make the computing stream wait for a batch; called on the thread that computes.

        Returns:
            The batch, on the device.
        """
        if in_flight.arrived is None:
            return self._whole(in_flight.content)
        computing = torch.accelerator.current_stream(self._device)
        computing.wait_event(in_flight.arrived)

        def used_here(tensor: Tensor) -> Tensor:
            """Keep the copying stream, whose memory it is, from reusing it before this one ends."""
            tensor.record_stream(computing)
            return tensor

        return self._whole(map_tensors(in_flight.content, used_here, _unchanged))

    def bring(self, content: object) -> object:
        """Copy a batch; what is computed next waits for it, what is computed now doesn't."""
        return self.finish(self.start(content))

    def describe(self) -> str:
        """Say for the start-up lines where copies run beside the device's work; else nothing."""
        return ", copied while the GPU computes" if self.is_beside else ""

    def _whole(self, content: object) -> object:
        return move_whole(content, self._device) if is_accelerator(self._device) else content

    def _moved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, non_blocking=self.is_beside)


def _unchanged(value: object) -> object:
    return value


def _pinned(tensor: Tensor) -> Tensor:
    return tensor if tensor.is_pinned() or not tensor.is_cpu else tensor.pin_memory()


@final
@dataclass(frozen=True)
class _Pending(Generic[T, Made]):
    item: T
    made: "Future[Made]"


def one_ahead(
    make: Callable[[T], Made], items: Iterable[T], device: torch.device
) -> Iterator[tuple[T, Made]]:
    """Apply a function to items on a background thread, one item ahead of the consumer.

    The thread ends with the iterator.
    """
    pending: deque[_Pending[T, Made]] = deque()
    with ThreadPoolExecutor(1, "paceline-batches", use_device, (device,)) as thread:
        for item in items:
            pending.append(_Pending(item, thread.submit(make, item)))
            if len(pending) > 1:
                yield _first_of(pending)
        while pending:
            yield _first_of(pending)


def _first_of(pending: deque[_Pending[T, Made]]) -> tuple[T, Made]:
    first = pending.popleft()
    return first.item, first.made.result()
