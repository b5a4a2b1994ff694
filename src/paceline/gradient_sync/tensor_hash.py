"""A number that stands for a tensor's bits: another one where any bit differs."""

import torch
from torch import Tensor

_CHUNK = 1 << 20
_NEXT_CHUNK = 0x9E3779B97F4A7C15 - (1 << 64)
"""An odd number: by it the sum so far is multiplied before the next chunk comes."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@torch.no_grad()
def hash_bits(tensor: Tensor) -> Tensor:
    """Hash a tensor's bits on its device, without waiting for it.

    The sum of (2i + 1) * bits_i over the elements of each million, in whole numbers modulo 2**64:
    it is exact, so that no order of summing changes it, and odd weights let no change of one
    element go unseen. Three operations for each million, or part of it.

    Args:
        tensor: Of any shape and type.

    Returns:
        () int64, on the tensor's device.
    """
    bits = _bits(tensor.detach())  # (N,)
    weights = torch.arange(1, 2 * max(1, min(len(bits), _CHUNK)), 2, device=bits.device)
    total = bits.new_zeros((), dtype=torch.int64)
    for chunk in bits.split(_CHUNK):
        total = (chunk * weights[: len(chunk)]).sum().add(total, alpha=_NEXT_CHUNK)
    return total


def _bits(tensor: Tensor) -> Tensor:
    """Give the elements as whole numbers: (N,), of their own size or of 8 bytes."""
    flat = tensor.flatten() if tensor.is_contiguous() else tensor.contiguous().flatten()
    return flat.view(_INTEGERS.get(flat.element_size(), torch.int64))
