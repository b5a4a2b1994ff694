"""Buffers that each worker keeps for itself while training (BatchNorm's running statistics)."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from paceline.dist.group import Group


def local_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Name the floating-point buffers that a snapshot holds, in a fixed order.

    Integer buffers (BatchNorm's count of batches) advance alike on every worker.
    """
    saved = model.state_dict(keep_vars=True)
    buffers = {name: b for name, b in model.named_buffers() if name in saved}
    return {name: b for name, b in sorted(buffers.items()) if b.is_floating_point()}


def pack(buffers: Mapping[str, Tensor]) -> Tensor:
    """Lay buffers end to end as float64 on the CPU, which holds every smaller float exactly."""
    if not buffers:
        return torch.zeros(0, dtype=torch.float64)
    return torch.cat([b.detach().flatten().to("cpu", torch.float64) for b in buffers.values()])


@torch.no_grad()
def unpack(packed: Tensor, buffers: Mapping[str, Tensor]) -> None:
    """Write what `pack` made back into the buffers."""
    parts = packed.split([b.numel() for b in buffers.values()])
    for buffer, part in zip(buffers.values(), parts, strict=True):
        buffer.copy_(part.view(buffer.shape))


def gather_buffers(buffers: Mapping[str, Tensor], group: Group) -> Tensor:
    """Collect every worker's buffers. Collective.

    Returns:
        (world_size, K) float64 on the CPU, in rank order; K is 0 for a model without such buffers.
    """
    packed = pack(buffers)
    if packed.numel() == 0:
        return packed.new_zeros(group.world_size, 0)
    return group.gather_rows(packed)


def averaged(rows: Tensor) -> Tensor:
    """Average the workers' buffers: (world_size, K) to (K,), in rank order; one row stays as is."""
    return rows[0] if len(rows) == 1 else rows.mean(0)
