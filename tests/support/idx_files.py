"""Small files in MNIST's real format whose content a network can learn: the digits, upscaled."""

import gzip
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.data.digits import load_digits
from paceline.data.memory import TensorData

_PIXELS = 28
_SCALE = 255 // 16


def write_mnist(
    root: Path,
    train: int = 600,
    test: int = 120,
    gz: bool = True,
    classes: int = 10,
    *,
    name: str = "MNIST",
) -> Path:
    """Write the four files of a small MNIST as torchvision does; returns the root.

    Args:
        root: They go into `NAME/raw` below it.
        train: Training images, at most 1,442.
        test: Test images, at most 355.
        gz: Whether they are gzipped (and named so).
        classes: How many of the ten classes have images, which makes them fewer.
        name: MNIST or FashionMNIST.
    """
    directory = root / name / "raw"
    directory.mkdir(parents=True, exist_ok=True)
    for prefix, count, data in zip(("train", "t10k"), (train, test), load_digits(), strict=True):
        images, labels = upscaled(data, count, classes)
        write_idx(directory / f"{prefix}-images-idx3-ubyte", images, gz=gz)
        write_idx(directory / f"{prefix}-labels-idx1-ubyte", labels, gz=gz)
    return root


def upscaled(
    data: TensorData, count: int, classes: int = 10
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Blow the first digits up to 24x24, with a border to 28x28, values 0 to 240."""
    chosen = (data.labels < classes).nonzero()[:count, 0]
    if count > len(chosen):
        raise ValueError(f"the digits have only {len(chosen)} images of this kind")
    small = data.images[chosen, 0].numpy() * np.uint8(_SCALE)
    large = small.repeat(3, axis=1).repeat(3, axis=2)
    images = np.pad(large, ((0, 0), (2, 2), (2, 2)))
    assert images.shape[1:] == (_PIXELS, _PIXELS)
    return images, data.labels[chosen].numpy().astype(np.uint8)


def write_idx(path: Path, values: NDArray[np.uint8], *, gz: bool) -> Path:
    """Write an IDX file; a gzipped one gets the suffix .gz. Returns its path."""
    content = idx_bytes(values)
    target = path.with_name(path.name + ".gz") if gz else path
    target.write_bytes(gzip.compress(content, mtime=0) if gz else content)
    return target


def idx_bytes(values: NDArray[np.uint8]) -> bytes:
    """Give an array of bytes the IDX header."""
    header = struct.pack(f">HBB{values.ndim}I", 0, 0x08, values.ndim, *values.shape)
    return header + np.ascontiguousarray(values).tobytes()
