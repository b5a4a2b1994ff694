"""Small files in STL-10's real format, of digits in colour."""

from pathlib import Path

import numpy as np

from tests.support.cifar_files import coloured_digits

STL10_NAMES = "airplane bird car cat deer dog horse monkey ship truck".split()


def write_stl10(root: Path, train: int = 30, test: int = 20, classes: int = 10) -> Path:
    """Write `stl10_binary` below a directory; returns that folder.

    Args:
        root: Made if need be.
        train: Training images, at most 1,442.
        test: Test images, at most 355.
        classes: How many of the ten classes have images, which makes them fewer.
    """
    folder = root / "stl10_binary"
    folder.mkdir(parents=True)
    for part, (name, count) in enumerate((("train", train), ("test", test))):
        images, labels = coloured_digits(count, part, side=96, classes=classes)
        (folder / f"{name}_X.bin").write_bytes(images.swapaxes(2, 3).tobytes())  # by columns
        (folder / f"{name}_y.bin").write_bytes((labels + np.uint8(1)).tobytes())
    (folder / "class_names.txt").write_text("\n".join(STL10_NAMES) + "\n")
    return folder
