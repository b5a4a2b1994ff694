"""Compresses gradients to bfloat16 while they are sent.

PyTorch's own hook for bfloat16 is refused, by its name, where PyTorch was built without CUDA.
"""

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # not declared there
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from paceline.gradient_sync.network_model import ring_bytes


@final
class Compression:
    """Has DistributedDataParallel send its buckets in bfloat16."""

    def attach(self, parallel: DistributedDataParallel) -> None:
        """Put a hook in the place of a new model's own all-reduce. Local to the worker."""
        parallel.register_comm_hook(self, _average_bucket)

    def wire_bytes(self, tensors: Sequence[Tensor], workers: int) -> float:
        """Count what one worker sends for gradients of these parameters."""
        return ring_bytes(
            sum(t.numel() * self.wire_dtype(t.dtype).itemsize for t in tensors), workers
        )

    def wire_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Say what gradients of a type travel in: never in more bytes than they have."""
        return dtype if dtype.itemsize <= torch.bfloat16.itemsize else torch.bfloat16


def _average_bucket(compression: Compression, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket over all workers: divide, round, sum, widen. Doesn't block."""
    content = bucket.buffer()
    content.div_(dist.get_world_size())
    sent = content.to(compression.wire_dtype(content.dtype))  # itself where nothing is rounded
    work = dist.all_reduce(sent, async_op=True)
    assert work is not None

    def widen(arrived: Future[list[Tensor]]) -> Tensor:
        received: Tensor = arrived.value()[0]
        return received if received is content else content.copy_(received)

    averaged: Future[Tensor] = work.get_future().then(widen)
    return averaged
