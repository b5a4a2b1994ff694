"""Random changes of training images: a whole batch at a time, random numbers keyed by sample.

The numbers are the same on any device and any number of workers. Counter-based: splitmix64 of
(seed, epoch, stream, sample index, draw) in wrapping int64 arithmetic.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.data.splitmix import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, Domain, derive_key


class Augment(Protocol):
    """Changes a batch of raw images; a sample gets the same change whichever worker sees it.

    Each sample may depend on itself and its own draws alone, in the same arithmetic however many
    samples come with it. Nothing may wait for the device.
    """

    @property
    def num_draws(self) -> int:
        """Random numbers that one sample needs; 0 for a change that isn't random."""

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Change the images; must not change its input.

        Args:
            images: Raw values as stored, (N, C, H, W) in any memory format: uint8, or float32 of
                the same scale after a change that gave floats.
            draws: float32 (N, num_draws) in [0, 1), on the same device.

        Returns:
            (N, C, H', W'), uint8 or float32 of the same scale, not normalised. H' and W' may be
            others than H and W, the same for all samples.
        """


class RandomShift:
    """Shifts each image by up to `pixels` in both directions; what comes in is 0 (black)."""

    def __init__(self, pixels: int) -> None:
        """Create the random shift.

        Args:
            pixels: Largest shift; every offset from -pixels to +pixels is equally likely.
        """
        if pixels < 1:
            raise ValueError(f"a shift by {pixels} pixels: give at least 1")
        self._pixels = pixels

    @property
    def num_draws(self) -> int:
        """Two: rows and columns."""
        return 2

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Shift; (N, C, H, W) to the same."""
        num, _, height, width = images.shape
        padded = F.pad(images, (self._pixels,) * 4)
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # (N, C, 2p+1, 2p+1, H, W)
        # Every window of the padded image is a view; indexing copies one for each sample.
        offsets = (draws * (2 * self._pixels + 1)).to(torch.int64)  # (N, 2)
        sample = torch.arange(num, device=images.device)
        return windows[sample, :, offsets[:, 0], offsets[:, 1]]

    def __repr__(self) -> str:
        return f"shift by up to {self._pixels} px"


class RandomFlip:
    """Mirrors each image left to right with probability one half."""

    @property
    def num_draws(self) -> int:
        """One."""
        return 1

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Mirror; (N, C, H, W) to the same."""
        return torch.where(draws[:, :1, None, None] < 0.5, images.flip(3), images)

    def __repr__(self) -> str:
        return "random flip"


class Resize:
    """Scales images to one size, bilinear, averaging where they get smaller; not random.

    Within 1 of what Pillow (torchvision's Resize) returns for each image. On a CPU uint8 is worked
    on as it is; other devices go through float32 and round.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        """Choose the size.

        Args:
            size: (height, width) of the result, in pixels.
        """
        if min(size) < 1:
            raise ValueError(f"a size of {size} pixels: give at least 1")
        self._size = size

    @property
    def num_draws(self) -> int:
        """None."""
        return 0

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Scale; (N, C, H, W) to (N, C, *size) of the same type."""
        if images.dtype != torch.uint8 or images.is_cpu:
            return self._scale(images)
        return self._scale(images.to(torch.float32)).round_().clamp_(0, 255).to(torch.uint8)

    def _scale(self, images: Tensor) -> Tensor:
        if images.shape[2:] == self._size:
            return images
        return F.interpolate(images, self._size, mode="bilinear", antialias=True)

    def __repr__(self) -> str:
        return f"resize to {self._size[0]}x{self._size[1]} px"


_UNIT = 2.0**-24
"""float32 holds 24 bits: every multiple of this in [0, 1) is exact."""


def uniforms(seed: int, epoch: int, indices: Tensor, stream: int, count: int) -> Tensor:
    """Draw numbers in [0, 1) for samples.

    Args:
        epoch: 0 for the first.
        indices: Sample indices, int64 (N,), on any device.
        stream: Which use this is (the position of an augmentation in its list).
        count: Numbers per sample.

    Returns:
        float32 (N, count) on the device of `indices`; equal arguments give equal bits everywhere.
    """
    # A counter-based generator: splitmix64 of the sample's index, then of the number of the draw.
    key = derive_key(Domain.AUGMENTATION, seed, epoch, stream)
    samples = _mix64(indices * _signed(GOLDEN) + _signed(key))  # (N,)
    draws = torch.arange(1, count + 1, dtype=torch.int64, device=indices.device)
    bits = _mix64(samples[:, None] + draws * _signed(GOLDEN))  # (N, count)
    # The upper 24 of 64 bits
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
