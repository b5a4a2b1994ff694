"""Flip, rotation, shear, scale and translation of a batch, composed into one resampling.

Letters: N samples, C channels, H height, W width. Positions are in pixels, x before y, with the
origin at the image's centre. Signs, centre and order are those of torchvision's `affine`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.distributed.device import widest_float

Interpolation = Literal["nearest", "bilinear"]
Range = tuple[float, float]

# Positions are computed in `widest_float`. In float64 a last-bit difference between the vectorised
# and the scalar cosine is gone once the result is rounded to float32: the bits can't depend on a
# sample's place in the batch.


class Geometric(Protocol):
    """Interface of affine augmentations, with a map for each sample; part of a `Warp`."""

    @property
    def num_draws(self) -> int:
        """Random numbers that one sample needs."""

    def inverse(self, draws: Tensor, height: int, width: int) -> Tensor:
        """Map positions in the output to positions in the input.

        Args:
            draws: float32 (N, num_draws) in [0, 1).
            height: Of the images, in pixels.
            width: Of the images, in pixels.

        Returns:
            float64 (N, 2, 3) on the device of `draws`: input = [:, :, :2] @ output + [:, :, 2].
        """


@dataclass(frozen=True, kw_only=True)
class AffineParameters:
    """What `RandomAffine` does to each sample; all float64 (N,)."""

    angle: Tensor
    """Degrees, clockwise."""
    translate_x: Tensor
    """Whole pixels to the right."""
    translate_y: Tensor
    """Whole pixels down."""
    scale: Tensor
    shear_x: Tensor
    """Degrees."""
    shear_y: Tensor
    """Degrees."""
    flip: Tensor
    """-1 where the image is mirrored left to right before everything else, else 1."""

    def inverse(self) -> Tensor:
        """Give the inverse of translate @ rotate @ scale @ shear @ flip as (N, 2, 3).

        The product of rotation and shears is that of torchvision's `_get_inverse_affine_matrix`;
        its determinant is 1.
        """
        angle, shear_x, shear_y = map(torch.deg2rad, (self.angle, self.shear_x, self.shear_y))
        # [[a, b], [c, d]] = rotation @ shear; its determinant is 1, its inverse [[d, -b], [-c, a]].
        a = (angle - shear_y).cos() / shear_y.cos()
        b = -a * shear_x.tan() - angle.sin()
        c = (angle - shear_y).sin() / shear_y.cos()
        d = -c * shear_x.tan() + angle.cos()
        across, down = self.flip / self.scale, 1 / self.scale
        xx, xy, yx, yy = d * across, -b * across, -c * down, a * down
        # The translation comes last, so its inverse comes first: input = M (output - t).
        x = -(xx * self.translate_x + xy * self.translate_y)
        y = -(yx * self.translate_x + yy * self.translate_y)
        return torch.stack((xx, xy, x, yx, yy, y), dim=1).view(-1, 2, 3)


class RandomAffine:
    """Mirrors, shears, scales, rotates and moves each image, in this order, in one resampling.

    Alone it resamples to the nearest pixel and fills with 0 (black), as torchvision's does; for
    something else, and to compose it with others, put it into a `Warp`.
    """

    def __init__(
        self,
        degrees: float | Range = 0.0,
        *,
        translate: Range = (0.0, 0.0),
        scale: Range = (1.0, 1.0),
        shear: float | Range | tuple[float, float, float, float] = 0.0,
        flip: float = 0.0,
    ) -> None:
        """Every value is drawn evenly from its range.

        Args:
            degrees: Clockwise rotation, in degrees: (from, to), or one number for both directions.
            translate: Largest shift right or left and up or down, as a share of width and height;
                whole pixels.
            scale: (from, to); 1 keeps the size.
            shear: Along x in degrees, like `degrees`; with four numbers x and y: (from, to, from,
                to).
            flip: Probability of mirroring left to right.
        """
        self._degrees = _two_sided(degrees)
        self._translate = translate
        self._scale = scale
        given = shear if isinstance(shear, tuple) else _two_sided(shear)
        self._shear = (*given, 0.0, 0.0)[:4]
        self._flip = flip
        self._check()

    def _check(self) -> None:
        ranges = (self._degrees, self._scale, self._shear[:2], self._shear[2:])
        if any(low > high for low, high in ranges):
            raise ValueError(f"{self}: each range should be (smaller, larger)")
        if self._scale[0] <= 0:
            raise ValueError(f"{self}: a scale should be more than 0")
        if not all(0 <= share <= 1 for share in (*self._translate, self._flip)):
            raise ValueError(f"{self}: shares of the size and probabilities are from 0 to 1")
        if any(abs(angle) >= 90 for angle in self._shear):
            raise ValueError(f"{self}: a shear should be less than 90 degrees")

    @property
    def num_draws(self) -> int:
        """Seven, whatever is used: changing one range leaves the other values as they are."""
        return 7

    def parameters(self, draws: Tensor, height: int, width: int) -> AffineParameters:
        """Turn draws (N, 7) into what happens to each sample; `height` and `width` in pixels."""
        angle, x, y, scale, shear_x, shear_y, flip = draws.to(widest_float(draws.device)).unbind(1)
        across, down = self._translate[0] * width, self._translate[1] * height
        return AffineParameters(
            angle=_between(angle, *self._degrees),
            translate_x=_between(x, -across, across).round(),
            translate_y=_between(y, -down, down).round(),
            scale=_between(scale, *self._scale),
            shear_x=_between(shear_x, *self._shear[:2]),
            shear_y=_between(shear_y, *self._shear[2:]),
            flip=torch.where(flip < self._flip, -1.0, 1.0).to(flip.dtype),
        )

    def inverse(self, draws: Tensor, height: int, width: int) -> Tensor:
        """Say where pixels come from: see `Geometric`."""
        return self.parameters(draws, height, width).inverse()

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Resample; (N, C, H, W) to the same, float32."""
        return resample(images, self.inverse(draws, *images.shape[2:]))

    def __repr__(self) -> str:
        parts: dict[str, tuple[float | Sequence[float], float | Sequence[float]]] = {
            "degrees": (self._degrees, (0.0, 0.0)),
            "translate": (self._translate, (0.0, 0.0)),
            "scale": (self._scale, (1.0, 1.0)),
            "shear": (self._shear, (0.0,) * 4),
            "flip": (self._flip, 0.0),
        }
        used = [f"{name} {_written(v)}" for name, (v, unused) in parts.items() if v != unused]
        return f"affine ({', '.join(used)})"


class Warp:
    """Composes geometric changes, the first one first, and resamples each image once."""

    def __init__(
        self, *changes: Geometric, interpolation: Interpolation = "nearest", fill: float = 0.0
    ) -> None:
        """Create the warp.

        Args:
            changes: `RandomFlip`, `RandomAffine` or your own.
            interpolation: How a value between pixels is found; "nearest" is torchvision's default.
            fill: Raw value of what comes in from outside the image.
        """
        if not changes:
            raise ValueError("a warp of nothing: give at least one geometric change")
        if interpolation not in ("nearest", "bilinear"):
            raise ValueError(f"interpolation {interpolation!r}: use 'nearest' or 'bilinear'")
        self._changes = changes
        self._interpolation = interpolation
        self._fill = fill

    @property
    def num_draws(self) -> int:
        """Those of all changes, one change after the other."""
        return sum(change.num_draws for change in self._changes)

    def __call__(self, images: Tensor, draws: Tensor) -> Tensor:
        """Resample; (N, C, H, W) to the same, float32."""
        height, width = images.shape[2:]
        tables = draws.split([change.num_draws for change in self._changes], dim=1)
        inverses = [
            change.inverse(table, height, width)
            for change, table in zip(self._changes, tables, strict=True)
        ]
        # One map for all changes: resampling more than once would blur the image.
        inverse = inverses[0]
        for then in inverses[1:]:
            inverse = _compose(inverse, then)
        return resample(images, inverse, interpolation=self._interpolation, fill=self._fill)

    def __repr__(self) -> str:
        return f"warp ({', '.join(map(str, self._changes))}; {self._interpolation})"


def resample(
    images: Tensor,
    inverse: Tensor,
    *,
    interpolation: Interpolation = "nearest",
    fill: float = 0.0,
) -> Tensor:
    """Take each pixel from where its sample's map says.

    Args:
        images: (N, C, H, W), uint8 or float32, in any memory format.
        inverse: From positions in the output to positions in the input, float64 (N, 2, 3).
        interpolation: As torch's `grid_sample` does it.
        fill: The value outside of the image.

    Returns:
        float32 (N, C, H, W), contiguous, on the scale of the input.
    """
    source = images.to(torch.float32, memory_format=torch.contiguous_format)
    if fill:
        source = source - fill  # grid_sample knows 0 alone
    grid = _sampling_grid(inverse, *images.shape[2:])
    sampled = F.grid_sample(source, grid, interpolation, "zeros", align_corners=False)
    return sampled.add_(fill) if fill else sampled


def _sampling_grid(inverse: Tensor, height: int, width: int) -> Tensor:
    """Give the positions that `grid_sample` wants, -1 … 1 from edge to edge: (N, H, W, 2)."""
    across = _centred(width, inverse.device)
    down = _centred(height, inverse.device)
    # Built as two planes (N, 2, H, W): grid_sample reads them at full speed, and so are they made.
    # Pixels from the centre: an affine map is a column's share plus a row's share.
    columns = inverse[:, :, 0, None] * across  # (N, 2, W)
    rows = inverse[:, :, 1, None] * down + inverse[:, :, 2, None]  # (N, 2, H)
    columns, rows = (
        torch.stack((t[:, 0] * (2 / width), t[:, 1] * (2 / height)), dim=1).to(torch.float32)
        for t in (columns, rows)
    )
    return (columns[:, :, None, :] + rows[:, :, :, None]).permute(0, 2, 3, 1)


def _centred(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, dtype=widest_float(device), device=device) - (length - 1) / 2


def _compose(first: Tensor, then: Tensor) -> Tensor:
    """Give the inverse of doing `first`, then `then`; all (N, 2, 3).

    Written out: a matrix product's rounding may depend on the size of the batch.
    """
    # first(then(p)), linear parts multiplied: outputs are mapped back through `then` first.
    product = first[:, :, 0:1] * then[:, 0:1] + first[:, :, 1:2] * then[:, 1:2]
    return F.pad(first[:, :, 2:], (2, 0)) + product


def _two_sided(value: float | Range) -> Range:
    return value if isinstance(value, tuple) else (-abs(value), abs(value))


def _between(draws: Tensor, low: float, high: float) -> Tensor:
    return draws * (high - low) + low


def _written(value: float | Sequence[float]) -> str:
    return f"{value:g}" if isinstance(value, float | int) else " ".join(f"{v:g}" for v in value)
