"""Batched copies of tensors between host and device, with few launches and synchronizations.

A copy to the host waits for the device, one from ordinary host memory too, and each costs a launch.
So many small tensors travel end to end, as bytes; on CPUs each is taken as it is.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from paceline.distributed.device import can_pin


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Lay tensors of one device end to end: (bytes,) uint8 there. `cut` takes them out again."""
    flat = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors]
    return torch.cat([flat[place] for place in _widest_first(tensors)])


def cut(joined: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Take out of bytes what `join` has put there.

    Args:
        joined: (bytes,) uint8.
        like: Of the shapes and types that were joined, in the same order.

    Returns:
        Views of `joined`, contiguous.
    """
    order = _widest_first(like)
    ends = accumulate((like[place].nbytes for place in order), initial=0)
    copies = {
        place: joined[start:stop].view(like[place].dtype).view(like[place].shape)
        for place, (start, stop) in zip(order, pairwise(ends), strict=True)
    }
    return [copies[place] for place in range(len(like))]


def fetch(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Bring tensors to the host: one copy, which waits for the device.

    Returns:
        On the CPU; those that are there already as they are.
    """
    if len({tensor.device for tensor in tensors}) != 1 or tensors[0].is_cpu:
        return [tensor.detach().cpu() for tensor in tensors]
    return cut(join(tensors).cpu(), tensors)


@torch.no_grad()
def send(values: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """Copy host tensors into others of the same shapes: one asynchronous copy.

    Args:
        values: On the CPU, of any types.
        targets: On any device.
    """
    devices = {target.device for target in targets}
    if len(devices) != 1 or targets[0].is_cpu:
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)
        return
    cast = [value.to(target.dtype) for value, target in zip(values, targets, strict=True)]
    copy_all(targets, cut(to_device(join(cast), devices.pop()), cast))


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors of one device into others of it: one launch for each type, on CPUs one each.

    Of any strides; those whose layout changes have a launch of their own.
    """
    alike: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        if target.is_cpu or target.stride() != source.stride() or target.dtype != source.dtype:
            target.copy_(source)
        else:
            alike.setdefault(target.dtype, []).append((target, source))
    for pairs in alike.values():
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor of the host to a device; where memory can be pinned without waiting for it."""
    if not can_pin(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _widest_first(tensors: Sequence[Tensor]) -> list[int]:
    """Order places so that each tensor starts at a multiple of its type's width."""
    return sorted(range(len(tensors)), key=lambda place: -tensors[place].itemsize)
