"""Brightness, contrast and saturation of a batch, each sample with its own factors."""

import torch
from torch import Tensor

from paceline.distributed.device import widest_float
from paceline.errors import DataError

_GREY = (0.2989, 0.587, 0.114)
"""Luma weights of ITU-R BT.601 (section 2.5.1), with the digits that torchvision uses."""


class ColorJitter:
    """Changes brightness, then contrast, then saturation, by torchvision's formulas.

    torchvision draws the order of the three anew for each image. Apart from cutting values off at
    black and white all three commute exactly, so here the order is fixed.
    """

    def __init__(
        self,
        brightness: float | tuple[float, float] = 0.0,
        contrast: float | tuple[float, float] = 0.0,
        saturation: float | tuple[float, float] = 0.0,
        *,
        white: float = 255.0,
    ) -> None:
        """Every factor is drawn evenly from its range; 1 changes nothing.

        Args:
            brightness: (from, to), or one number b for (max(0, 1 - b), 1 + b).
            contrast: The same.
            saturation: The same; without effect on images of one channel.
            white: The largest raw value: `TensorData.scale`.
        """
        given = {"brightness": brightness, "contrast": contrast, "saturation": saturation}
        self._ranges = tuple(_factors(name, value) for name, value in given.items())
        self._white = white

    @property
    def num_draws(self) -> int:
        """Three, whatever is used."""
        return 3

    def factors(self, draws: Tensor) -> Tensor:
        """Turn draws (N, 3) into the factors for brightness, contrast, saturation: (N, 3)."""
        columns = zip(draws.unbind(1), self._ranges, strict=True)
        return torch.stack([drawn * (high - low) + low for drawn, (low, high) in columns], dim=1)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Change colours; (N, C, H, W) with C 1 or 3 to the same, float32."""
        return jitter(images, self.factors(draws), white=self._white)

    def __repr__(self) -> str:
        names = ("brightness", "contrast", "saturation")
        used = [
            f"{name} {low:g} {high:g}"
            for name, (low, high) in zip(names, self._ranges, strict=True)
            if (low, high) != (1.0, 1.0)
        ]
        return f"colour jitter ({', '.join(used)})"


def jitter(images: Tensor, factors: Tensor, *, white: float) -> Tensor:
    """Change brightness, contrast and saturation.

    Multiplications and additions are separate operators: fused ones round differently at the end
    of a vector, and a sample's bits would depend on its place in the batch.

    Args:
        images: (N, C, H, W) from 0 to `white`, uint8 or float32; C is 1 or 3.
        factors: float32 (N, 3): brightness, contrast, saturation, none of them negative.
        white: The largest value; what is beyond it is cut off after each change.

    Returns:
        float32 (N, C, H, W) from 0 to `white`.

    Raises:
        DataError: There are neither 1 nor 3 channels.
    """
    channels = images.shape[1]
    if channels not in (1, 3):
        raise DataError(f"colour jitter takes images of 1 or 3 channels, not {channels}")
    # Each factor blends the image with another: black, its mean grey, each pixel's own grey.
    brightness, contrast, saturation = factors[:, :, None, None, None].unbind(1)  # (N, 1, 1, 1)
    changed = torch.mul(images, brightness).clamp_(max=white)  # (N, C, H, W)
    mean = _mean_grey(changed).mul_(1 - contrast)  # (N, 1, 1, 1)
    changed.mul_(contrast).add_(mean).clamp_(0, white)
    if channels == 1:
        return changed
    grey = _grey(changed).mul_(1 - saturation)  # (N, 1, H, W)
    return changed.mul_(saturation).add_(grey).clamp_(0, white)


def _grey(images: Tensor) -> Tensor:
    """(N, 3, H, W) to (N, 1, H, W)."""
    red, green, blue = (images[:, c : c + 1] * weight for c, weight in enumerate(_GREY))
    return red.add_(green).add_(blue)


def _mean_grey(images: Tensor) -> Tensor:
    """Give each image's mean grey value, float32 (N, 1, 1, 1).

    A sum of float32 values in float64 loses no bits worth mentioning: the order of summing, which
    depends on device, threads and batch, can't be seen in the result.
    """
    exact = widest_float(images.device)
    means = images.sum((2, 3), keepdim=True, dtype=exact) / images[0, 0].numel()
    return (_grey(means) if images.shape[1] == 3 else means).to(torch.float32)


def _factors(name: str, value: float | tuple[float, float]) -> tuple[float, float]:
    low, high = value if isinstance(value, tuple) else (max(0.0, 1.0 - value), 1.0 + value)
    if not 0 <= low <= high:
        raise ValueError(f"{name} {value}: give (smaller, larger), neither of them negative")
    return low, high
