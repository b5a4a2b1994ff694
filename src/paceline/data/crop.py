"""Changes that give images another size: random crops for training, fixed ones for evaluation.

Letters: N samples, C channels, H height, W width; S the size asked for.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.distributed.device import widest_float
from paceline.errors import DataError


def resize(images: Tensor, size: int | tuple[int, int]) -> Tensor:
    """Resize a batch by bilinear interpolation, antialiased where it shrinks.

    Within 1 of what Pillow (torchvision's Resize) gives for each image. On a CPU uint8 is worked on
    as it is; other devices go through float32 and round.

    Args:
        images: uint8 (N, C, H, W), on any device.
        size: Height and width; one number for both.

    Returns:
        uint8 (N, C, height, width) on the same device; the input itself where nothing changes.
    """
    height, width = (size, size) if isinstance(size, int) else size
    if images.shape[2:] == (height, width):
        return images
    if images.is_cpu:
        return _interpolated(images, height, width)
    return _as_uint8(_interpolated(images.to(torch.float32), height, width))


def shorter_side_to(height: int, width: int, size: int) -> tuple[int, int]:
    """Scale height and width so that the shorter one is `size`; the other rounds down."""
    if height <= width:
        return size, max(size, size * width // height)
    return max(size, size * height // width), size


def center_crop(images: Tensor, size: int) -> Tensor:
    """Cut the middle out; (..., H, W) with H, W >= size to (..., size, size), a view.

    An odd rest is halved as torchvision's CenterCrop halves it.
    """
    height, width = images.shape[-2:]
    top, left = round((height - size) / 2), round((width - size) / 2)
    return images[..., top : top + size, left : left + size]


def _as_uint8(exact: Tensor) -> Tensor:
    return exact.round_().clamp_(0, 255).to(torch.uint8)


def _interpolated(images: Tensor, height: int, width: int) -> Tensor:
    return F.interpolate(
        images, size=(height, width), mode="bilinear", align_corners=False, antialias=True
    )


_TRIES = 10
"""torchvision's: how often a box is drawn before the largest one in the middle is taken."""


class RandomResizedCrop:
    """Cuts a box of random area and shape out of each image and scales it to one size, bilinear.

    torchvision's `RandomResizedCrop(antialias=False)`: boxes much larger than `size` are sampled,
    not averaged. Between packed images of 256 and a size of 224 there is no difference to speak of.
    On a CPU values are those of torchvision's v2 on uint8 tensors, elsewhere within 1 of them.
    """

    def __init__(
        self,
        size: int,
        *,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
    ) -> None:
        """Create the random resized crop.

        Args:
            size: Height and width of the result, in pixels.
            scale: Area of the box as a share of the image's, (from, to).
            ratio: Width over height of the box, (from, to), drawn evenly on a log scale.
        """
        _check_size(size)
        if not 0 < scale[0] <= scale[1] or not 0 < ratio[0] <= ratio[1]:
            raise ValueError(f"scale {scale}, ratio {ratio}: give (smaller, larger), above 0")
        self._size = size
        self._scale = scale
        self._ratio = ratio

    @property
    def num_draws(self) -> int:
        """Area and ratio of each try, and two for the place."""
        return 2 * _TRIES + 2

    def boxes(self, draws: Tensor, height: int, width: int) -> Tensor:
        """Turn draws (N, num_draws) into boxes.

        Returns:
            float64 (N, 4), whole numbers: top, left, height, width.
        """
        # As torchvision's RandomResizedCrop: area uniform, aspect ratio log-uniform, several tries.
        exact = draws.to(widest_float(draws.device))
        area = exact[:, :_TRIES] * (self._scale[1] - self._scale[0]) + self._scale[0]
        low, high = math.log(self._ratio[0]), math.log(self._ratio[1])
        ratio = (exact[:, _TRIES : 2 * _TRIES] * (high - low) + low).exp()
        # ratio = width / height, area = width * height
        tall = (area * (height * width) / ratio).sqrt().round()  # (N, tries)
        wide = (area * (height * width) * ratio).sqrt().round()
        # The first try that fits in; `argmax` gives the first of equal largest values.
        fits = (tall >= 1) & (tall <= height) & (wide >= 1) & (wide <= width)
        first = fits.to(torch.int8).argmax(dim=1, keepdim=True)
        is_valid = fits.gather(1, first)
        tall, wide = tall.gather(1, first), wide.gather(1, first)  # (N, 1)
        # A corner, uniform over all places of the box.
        top = (exact[:, -2:-1] * (height - tall + 1)).floor()
        left = (exact[:, -1:] * (width - wide + 1)).floor()
        drawn = torch.cat((top, left, tall, wide), dim=1)
        # No try fits: the box in the middle.
        middle = (torch.full_like(top, value) for value in self._middle(height, width))
        return torch.where(is_valid, drawn, torch.cat(tuple(middle), dim=1))

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Crop and scale; (N, C, H, W) to (N, C, S, S), uint8 stays so, others become float32."""
        height, width = images.shape[2:]
        boxes = self.boxes(draws, height, width)
        if images.is_cpu and images.dtype == torch.uint8:
            return self._cut_one_by_one(images, boxes)
        # Where each pixel of the result lies in its image, then all images resampled at once.
        top, left, tall, wide = boxes[:, :, None].unbind(1)
        steps = torch.arange(self._size, dtype=top.dtype, device=draws.device) + 0.5
        rows = _positions(top, tall, steps / self._size, height)
        columns = _positions(left, wide, steps / self._size, width)
        shape = (len(images), self._size, self._size)
        grid = torch.stack(
            (columns[:, None, :].expand(shape), rows[:, :, None].expand(shape)), dim=1
        )
        source = images.to(torch.float32, memory_format=torch.contiguous_format)
        grid = grid.permute(0, 2, 3, 1)
        cut = F.grid_sample(source, grid, "bilinear", "border", align_corners=False)
        return _as_uint8(cut) if images.dtype == torch.uint8 else cut

    def _cut_one_by_one(self, images: Tensor, boxes: Tensor) -> Tensor:
        """Scale each box by the kernel for uint8: half the time of a grid over the batch."""
        cut = images.new_empty(*images.shape[:2], self._size, self._size)
        for sample, (top, left, tall, wide) in enumerate(boxes.to(torch.int64).tolist()):
            box = images[sample : sample + 1, :, top : top + tall, left : left + wide]
            size = (self._size, self._size)
            cut[sample] = F.interpolate(box, size, mode="bilinear", align_corners=False)[0]
        return cut

    def _middle(self, height: int, width: int) -> tuple[int, int, int, int]:
        tall, wide = height, width
        if width / height < self._ratio[0]:
            tall = round(width / self._ratio[0])
        elif width / height > self._ratio[1]:
            wide = round(height * self._ratio[1])
        return (height - tall) // 2, (width - wide) // 2, tall, wide

    def __repr__(self) -> str:
        low, high = self._scale
        return f"random crop of {low:g}-{high:g} of the area to {self._size} px"


class RandomCrop:
    """Cuts a square out of each image at a random place. For one with padding: `RandomShift`."""

    def __init__(self, size: int) -> None:
        """Create the random crop.

        Args:
            size: Height and width of the result, in pixels; at most those of the images.
        """
        _check_size(size)
        self._size = size

    @property
    def num_draws(self) -> int:
        """Two: row and column."""
        return 2

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Crop; (N, C, H, W) to (N, C, S, S) of the same type."""
        height, width = images.shape[2:]
        _check_fits(self._size, height, width)
        windows = images.unfold(2, self._size, 1).unfold(3, self._size, 1)
        top = (draws[:, 0] * (height - self._size + 1)).to(torch.int64)
        left = (draws[:, 1] * (width - self._size + 1)).to(torch.int64)
        sample = torch.arange(len(images), device=images.device)
        return windows[sample, :, top, left]

    def __repr__(self) -> str:
        return f"random crop to {self._size} px"


class CenterCrop:
    """Cuts a square out of the middle of each image; not random."""

    def __init__(self, size: int) -> None:
        """Create the center crop.

        Args:
            size: Height and width of the result, in pixels; at most those of the images.
        """
        _check_size(size)
        self._size = size

    @property
    def num_draws(self) -> int:
        """None."""
        return 0

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Crop; (N, C, H, W) to (N, C, S, S) of the same type, a view."""
        height, width = images.shape[2:]
        _check_fits(self._size, height, width)
        return center_crop(images, self._size)

    def __repr__(self) -> str:
        return f"middle {self._size} px"


class Resize:
    """Scales images, bilinear, averaging where they get smaller; not random."""

    def __init__(self, size: int | tuple[int, int]) -> None:
        """Create the resize.

        Args:
            size: (height, width) of the result, or the length of its shorter side, in pixels.
        """
        _check_size(size if isinstance(size, int) else min(size))
        self._size = size

    @property
    def num_draws(self) -> int:
        """None."""
        return 0

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Scale; (N, C, H, W) to (N, C, H', W') of the same type."""
        size = self._size
        if isinstance(size, int):
            size = shorter_side_to(images.shape[2], images.shape[3], size)
        if images.dtype == torch.uint8:
            return resize(images, size)
        return F.interpolate(images, size, mode="bilinear", antialias=True)

    def __repr__(self) -> str:
        size = self._size
        return f"resize to {size if isinstance(size, int) else f'{size[0]}x{size[1]}'} px"


def _positions(start: Tensor, length: Tensor, shares: Tensor, whole: int) -> Tensor:
    """Place pixel centres evenly in a part of a side, for `grid_sample`: float32 (N, S).

    Within half a pixel of the part's ends its last pixel counts alone, as if nothing lay outside.
    """
    pixels = start + length * shares - 0.5
    pixels = torch.minimum(torch.maximum(pixels, start), start + length - 1)
    return ((2 * pixels + 1) / whole - 1).to(torch.float32)


def _check_size(size: int) -> None:
    if size < 1:
        raise ValueError(f"a size of {size} pixels: give at least 1")


def _check_fits(size: int, height: int, width: int) -> None:
    if size > min(height, width):
        raise DataError(
            f"images of {height}x{width} (height x width) hold no square of {size} pixels: "
            f"use Resize({size}) before it, or a smaller size"
        )
