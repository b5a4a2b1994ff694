"""Copies batches from host to device asynchronously, on a stream of their own."""

from typing import final

import torch
from torch import Tensor

from paceline.data.batch import map_tensors, move_whole
from paceline.distributed.device import can_pin, is_accelerator


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

    def bring(self, content: object) -> object:
        """Copy a batch; what is computed next waits for it, what is computed now doesn't.

        Args:
            content: Tensors of the host, as `Batch.content` has them. What moves itself is moved on
                the computing stream.
        """
        if not self.is_beside:
            return self._whole(map_tensors(content, self._moved, _unchanged))
        self._stream = self._stream or torch.Stream(device=self._device)
        with self._stream:
            moved = map_tensors(content, lambda tensor: self._moved(_pinned(tensor)), _unchanged)
            arrived = self._stream.record_event()
        computing = torch.accelerator.current_stream(self._device)
        computing.wait_event(arrived)

        def used_here(tensor: Tensor) -> Tensor:
            """Keep the copying stream, whose memory it is, from reusing it before this one ends."""
            tensor.record_stream(computing)
            return tensor

        return self._whole(map_tensors(moved, used_here, _unchanged))

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
