"""What a training step works on: one worker's share of a global batch, on its device."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.data.order import Indices


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """One worker's samples of one step."""

    inputs: Tensor
    """First dimension: samples. On the worker's device."""
    targets: Tensor
    """First dimension: samples. On the worker's device."""
    local: int
    """Samples of this worker. 0 is possible (a short last batch on many workers): inputs and
    targets then hold one stand-in sample, so that the model can run, to be weighted with 0."""
    total: int
    """Samples in the global batch, over all workers. In evaluation: the same as `local`."""
    indices: Indices
    """Indices of this worker's samples in the data set, (local,)."""


def to_channels_last(images: Tensor) -> Tensor:
    """Lay images out with channels last, also where there is only one channel.

    `Tensor.to(memory_format=...)` leaves one-channel images as they are, since both layouts fit
    their bytes; a convolution then takes them for contiguous ones and the layers after it work in
    the slower layout. Strides that only fit channels-last make it real, without a copy.

    Args:
        images: (N, C, H, W).
    """
    if images.shape[1] > 1:
        return images.contiguous(memory_format=torch.channels_last)
    return images.contiguous()[:, 0, :, :, None].permute(0, 3, 1, 2)
