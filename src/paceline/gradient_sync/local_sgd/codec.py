"""Codecs that compress weight differences to bf16 or int8 for sending."""

from typing import Protocol, final

import torch
from torch import Tensor

from paceline.gradient_sync.options import SyncPrecision

BLOCK = 256
"""Elements that share a scale: 1.6 % more bytes, and a large element spoils few others."""
_MAX_CODE = 127
_SCALE_BYTES = 4


class Codec(Protocol):
    """Rounds rows of numbers to something smaller."""

    def encode(self, rows: Tensor) -> Tensor:
        """Round: (R, S) fp32 -> (R, E), S a multiple of `BLOCK`."""

    def decode(self, rows: Tensor) -> Tensor:
        """Give the rounded numbers: (R, E) -> (R, S) fp32."""


@final
class HalfCodec:
    """Rounds to bf16."""

    def encode(self, rows: Tensor) -> Tensor:
        """Round to (R, S) bf16."""
        return rows.to(torch.bfloat16)

    def decode(self, rows: Tensor) -> Tensor:
        """Give fp32 back."""
        return rows.to(torch.float32)


@final
class ByteCodec:
    """Rounds to one of 255 steps between minus and plus the largest of each block.

    A number that isn't finite leaves none of its block finite: it is noticed, not hidden.
    """

    def encode(self, rows: Tensor) -> Tensor:
        """Round to (R, S + 4 * S / BLOCK) uint8, the scales at the end of each row."""
        blocks = rows.to(torch.float32).view(len(rows), -1, BLOCK)  # (R, S / BLOCK, BLOCK)
        scales = blocks.abs().amax(2, keepdim=True) / _MAX_CODE  # (R, S / BLOCK, 1)
        divisors = torch.where(scales == 0, torch.ones_like(scales), scales)
        # A scale that isn't finite makes its block so when decoded, whatever the codes are.
        steps = (blocks / divisors).round_().nan_to_num_(0.0, _MAX_CODE, -_MAX_CODE)
        codes = steps.clamp_(-_MAX_CODE, _MAX_CODE).to(torch.int8)
        return torch.cat(
            [codes.view(len(rows), -1).view(torch.uint8), scales.flatten(1).view(torch.uint8)], 1
        )

    def decode(self, rows: Tensor) -> Tensor:
        """Give fp32 back."""
        blocks = rows.shape[1] // (BLOCK + _SCALE_BYTES)
        codes, scales = rows.split([blocks * BLOCK, blocks * _SCALE_BYTES], 1)
        steps = codes.contiguous().view(torch.int8).view(len(rows), blocks, BLOCK)
        sizes = scales.contiguous().view(torch.float32).view(len(rows), blocks, 1)
        return torch.mul(steps.to(torch.float32), sizes).view(len(rows), -1)


def codec_for(precision: SyncPrecision) -> Codec | None:
    """Choose how to round; None where nothing is rounded."""
    if precision == "fp32":
        return None
    return HalfCodec() if precision == "bf16" else ByteCodec()
