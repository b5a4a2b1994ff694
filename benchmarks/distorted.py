"""A task that isn't easy: the embedded digits, bent, turned, dimmed and covered, on 24x24 pixels.

Test images come from other originals than training images, with other distortions; each set is
drawn once, from fixed seeds.
"""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.digits import load_digits
from paceline.data.memory import TensorData
from paceline.training.job import Job

SIDE = 24
TRAIN_COPIES, TEST_COPIES = 7, 10
"""Images made of each original."""

_TURN = math.radians(25)
_SHEAR, _SHIFT = 0.25, 0.2
_SMALLEST, _LARGEST = 0.7, 1.05
_BEND, _BENDS = 0.15, 4
"""Half-images by which a point may move, and points a side at which that is drawn."""
_COVER = 7
"""Pixels a side of what is put over the image."""
_NOISE = 0.15
_LEAST_LIGHT = 0.35


class DistortedNet(nn.Module):
    """Three convolutions with BatchNorm and a linear layer behind Dropout: 100,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 16, 32, 64)
        blocks: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            blocks += [
                nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
                nn.BatchNorm2d(outputs),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
            ]
        self.features = nn.Sequential(*blocks)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(64 * 3 * 3, 128),
            nn.ReLU(inplace=True),
            nn.Dropout(0.3),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:  # (N, 1, 24, 24) -> (N, 10)
        scores: Tensor = self.classifier(self.features(images))
        return scores


def distorted_job() -> Job:
    """Make the job: 10,094 images to train on, 3,550 to test."""
    train, test = load_digits()
    return Job(
        model=DistortedNet(),
        train=distorted(train, TRAIN_COPIES, seed=1),
        validation=distorted(test, TEST_COPIES, seed=2),
    )


def distorted(digits: TensorData, copies: int, seed: int) -> TensorData:
    """Make so many images of each digit; the same ones for the same seed."""
    draw = torch.Generator().manual_seed(seed)
    images = (digits.images.float() / digits.scale).repeat(copies, 1, 1, 1)
    images = F.grid_sample(images, _grid(len(images), draw), align_corners=False)
    images = _covered(images, draw) * _between(_LEAST_LIGHT, 1.0, len(images), draw)[:, None]
    images = (
        images
        + _NOISE * torch.randn(images.shape, generator=draw) * images.amax((2, 3))[..., None, None]
    )
    shades = (255 * (0.25 + 0.6 * images)).clamp(0, 255).round().to(torch.uint8)
    return TensorData(
        name=f"distorted {digits.name}",
        images=shades,
        labels=digits.labels.repeat(copies),
        class_names=digits.class_names,
        mean=(0.35,),
        std=(0.15,),
    )


def _grid(number: int, draw: torch.Generator) -> Tensor:
    """Say where each pixel comes from: (N, 24, 24, 2), the image from -1 to 1."""
    turn = _between(-_TURN, _TURN, number, draw)[:, 0, 0]
    size = _between(_SMALLEST, _LARGEST, number, draw)[:, 0, 0]
    shear = _between(-_SHEAR, _SHEAR, number, draw)[:, 0, 0]
    shift = _SHIFT * (2 * torch.rand(number, 2, generator=draw) - 1)
    cos, sin = turn.cos() / size, turn.sin() / size
    rows = torch.stack((cos, shear * cos - sin, shift[:, 0]), 1)
    more = torch.stack((sin, shear * sin + cos, shift[:, 1]), 1)
    straight = F.affine_grid(torch.stack((rows, more), 1), [number, 1, SIDE, SIDE], False)
    bends = torch.rand(number, 2, _BENDS, _BENDS, generator=draw) * 2 - 1
    smooth = F.interpolate(bends, size=SIDE, mode="bicubic", align_corners=True)
    return straight + _BEND * smooth.permute(0, 2, 3, 1)


def _covered(images: Tensor, draw: torch.Generator) -> Tensor:
    """Put a square of an even shade over each."""
    corner = torch.randint(0, SIDE - _COVER + 1, (len(images), 2, 1, 1), generator=draw)
    places = torch.arange(SIDE)
    above = (places - corner[:, 0]) % SIDE < _COVER  # (N, 1, 24)
    beside = (places - corner[:, 1]) % SIDE < _COVER
    square = (above[..., None] & beside[..., None, :]).reshape(images.shape)
    shade = torch.rand(len(images), 1, 1, 1, generator=draw)
    return torch.where(square, shade, images)


def _between(low: float, high: float, number: int, draw: torch.Generator) -> Tensor:
    """Draw evenly: (N, 1, 1)."""
    return low + (high - low) * torch.rand(number, 1, 1, generator=draw)
