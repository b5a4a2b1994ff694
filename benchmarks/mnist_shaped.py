"""Data of MNIST's shape, made up: random images, as tensors or as IDX files."""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
from torch import Tensor

from benchmarks.loops import MEAN, STD
from paceline.data.memory import TensorData, synthetic_images


def mnist_shaped(samples: int, seed: int) -> TensorData:
    """Make random images of 1x28x28 in ten classes, normalised as MNIST is."""
    data = synthetic_images(samples, channels=1, height=28, width=28, classes=10, seed=seed)
    return replace(data, mean=(MEAN,), std=(STD,))


def write_mnist_shaped(directory: Path, train: int, test: int) -> Path:
    """Write the four IDX files where torchvision looks for them.

    Returns:
        The directory that holds the files, `MNIST/raw` below `directory`.
    """
    raw = directory / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, samples, seed in (("train", train, 1), ("t10k", test, 2)):
        data = mnist_shaped(samples, seed)
        _write_idx(raw / f"{prefix}-images-idx3-ubyte", data.images[:, 0])
        _write_idx(raw / f"{prefix}-labels-idx1-ubyte", data.labels)
    return raw


def _write_idx(path: Path, values: Tensor) -> None:
    header = struct.pack(f">HBB{values.ndim}I", 0, 0x08, values.ndim, *values.shape)
    path.write_bytes(header + values.numpy().astype(np.uint8).tobytes())
