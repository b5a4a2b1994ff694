"""The process group of a training: joining, leaving, and the small collectives it needs."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from paceline.dist.environment import Placement

_ENV_RENDEZVOUS = "env://"


@final
class Group:
    """All workers of a training. With one worker every collective is the identity.

    Every method is collective: all workers call it in the same order, and it blocks.
    """

    def __init__(self, placement: Placement, device: torch.device, backend: str) -> None:
        self.rank = placement.rank
        self.world_size = placement.world_size
        self.placement = placement
        self.device = device
        self.backend = backend

    def gather_rows(self, row: Tensor) -> Tensor:
        """Collect one small row from each worker.

        Args:
            row: (K,) on the CPU, the same K and dtype on every worker.

        Returns:
            (world_size, K), in rank order, on the CPU, the same on every worker.
        """
        if self.world_size == 1:
            return row.unsqueeze(0)
        rows = row.new_empty(self.world_size * row.numel())
        dist.all_gather_into_tensor(rows, row.contiguous())
        return rows.view(self.world_size, row.numel())

    def sum_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over all workers, in place."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def broadcast_(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by rank 0's, in place."""
        if self.world_size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    def broadcast_text(self, text: str) -> str:
        """Give every worker rank 0's text (no pickling: length first, then UTF-8 bytes)."""
        if self.world_size == 1:
            return text
        content = torch.frombuffer(bytearray(text.encode() or b"\0"), dtype=torch.uint8)
        length = self.broadcast_(torch.tensor([content.numel() if text else 0]))
        received = content if self.rank == 0 else content.new_empty(max(1, int(length)))
        self.broadcast_(received)
        return bytes(received.numpy()).decode() if int(length) else ""

    def gather_texts(self, text: str) -> list[str]:
        """Give every worker the texts of all, in rank order."""
        content = text.encode()
        lengths = self.gather_rows(torch.tensor([len(content)]))[:, 0].tolist()
        padded = bytearray(content.ljust(max(1, *lengths), b"\0"))
        rows = self.gather_rows(torch.frombuffer(padded, dtype=torch.uint8))
        return [bytes(row[:n].numpy()).decode() for row, n in zip(rows, lengths, strict=True)]

    def barrier(self) -> None:
        """Wait for all workers."""
        self.gather_rows(torch.zeros(1))


@contextmanager
def joined(
    placement: Placement, device: torch.device, backend: str, timeout_s: float
) -> Iterator[Group]:
    """Join the process group for the length of a training. Collective.

    The store's keys carry the attempt's number: after a restart on the same store a worker would
    otherwise read the addresses of the dead ones.

    Args:
        placement: This worker's place.
        device: This worker's device.
        backend: `nccl` or `gloo`; small control messages always go through gloo on the CPU.
        timeout_s: Seconds after which waiting for the others is an error.
    """
    if placement.world_size == 1:
        yield Group(placement, device, backend)
        return
    timeout = timedelta(seconds=timeout_s)
    meeting = rendezvous(_ENV_RENDEZVOUS, placement.rank, placement.world_size, timeout=timeout)
    store, rank, world_size = next(iter(meeting))
    dist.init_process_group(
        backend="gloo" if backend == "gloo" else f"cpu:gloo,cuda:{backend}",
        store=PrefixStore(f"paceline/attempt-{placement.attempt}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield Group(placement, device, backend)
    finally:
        dist.destroy_process_group()
