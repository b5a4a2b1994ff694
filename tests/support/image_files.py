"""Small image folders in real formats, of digits in colour that can be learnt."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from tests.support.cifar_files import coloured_digits

CLASSES = ("ant", "bee", "cat")
"""Digits 0, 1 and 2."""


def write_image_folder(
    root: Path,
    counts: Mapping[str, int] | None = None,
    *,
    suffixes: tuple[str, ...] = (".jpg", ".png", ".webp", ".bmp"),
    side: int = 48,
) -> Path:
    """Write SPLIT/CLASS/NUMBER.SUFFIX below a directory; returns it.

    Args:
        root: Made if need be.
        counts: Images of each class in each split; 8 for training and 4 for validation if left out.
        suffixes: The images take them in turn.
        side: Height in pixels, a multiple of 8; images are a quarter wider, more or less.
    """
    for split, count in (counts or {"train": 8, "val": 4}).items():
        images, labels = coloured_digits(350, int(split != "train"), side=side)
        for label, name in enumerate(CLASSES):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number, image in enumerate(images[labels == label][:count]):
                suffix = suffixes[number % len(suffixes)]
                wider = np.pad(image, ((0, 0), (0, 0), (number % 5, side // 4)))
                save(folder / f"{number:03}{suffix}", wider)
    return root


def save(path: Path, image: NDArray[np.uint8]) -> None:
    """Write an image, uint8 (3, H, W), in the format of the name's suffix."""
    Image.fromarray(image.transpose(1, 2, 0)).save(path)


def truncate(path: Path, share: float = 0.5) -> None:
    """Cut a file off."""
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
