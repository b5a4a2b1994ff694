"""Random numbers keyed by sample: the same on any device and any number of workers.

Counter-based: splitmix64 of (seed, epoch, stream, sample index, draw) in wrapping int64 arithmetic.
"""

import torch
from torch import Tensor

from paceline.data.splitmix import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, Domain, derive_key

_UNIT = 2.0**-24
"""float32 holds 24 bits: every multiple of this in [0, 1) is exact."""


def uniforms(seed: int, epoch: int, indices: Tensor, stream: int, count: int) -> Tensor:
    """Draw numbers in [0, 1) for samples.

    Args:
        seed: The training's seed.
        epoch: 0 for the first.
        indices: Sample indices, int64 (N,), on any device.
        stream: Which use this is (the position of an augmentation in its list).
        count: Numbers per sample.

    Returns:
        float32 (N, count) on the device of `indices`; equal arguments give equal bits everywhere.
    """
    key = derive_key(Domain.AUGMENTATION, seed, epoch, stream)
    samples = _mix64(indices * _signed(GOLDEN) + _signed(key))
    draws = torch.arange(1, count + 1, dtype=torch.int64, device=indices.device)
    bits = _mix64(samples[:, None] + draws * _signed(GOLDEN))
    return _shift_right(bits, 40).to(torch.float32) * _UNIT


def _mix64(values: Tensor) -> Tensor:
    values = (values ^ _shift_right(values, 30)) * _signed(MULTIPLIER_1)
    values = (values ^ _shift_right(values, 27)) * _signed(MULTIPLIER_2)
    return values ^ _shift_right(values, 31)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """Shift without sign: int64's own shift copies the sign bit into the freed ones."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
