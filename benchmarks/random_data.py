"""Random images of MNIST's and CIFAR-10's shape: as tensors, as IDX files, and one by one."""

import struct
from dataclasses import replace
from pathlib import Path
from typing import final

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset
from torchvision import transforms

from paceline.data.memory import TensorData, synthetic_images

MEAN, STD = 0.1307, 0.3081
PADDING = 4


def mnist_shaped(samples: int, seed: int) -> TensorData:
    """Make images of 1x28x28 in ten classes, normalised as MNIST is."""
    data = synthetic_images(samples, channels=1, height=28, width=28, classes=10, seed=seed)
    return replace(data, mean=(MEAN,), std=(STD,))


def cifar_shaped(samples: int, seed: int = 0) -> TensorData:
    """Make images of 3x32x32 in ten classes."""
    data = synthetic_images(samples, channels=3, height=32, width=32, classes=10, seed=seed)
    return replace(data, mean=(0.5,) * 3, std=(0.5,) * 3)


@final
class OneByOne(Dataset[tuple[Tensor, int]]):
    """Images as torchvision's data sets keep them: an array, made a PIL image and transformed."""

    def __init__(self, data: TensorData, *, augment: bool) -> None:
        """Args:
        data: Images of three channels, or of one.
        augment: Cut out at random after padding, and mirror half of them.
        """
        self._arrays = data.images.permute(0, 2, 3, 1).squeeze(3).contiguous().numpy()
        self._labels = data.labels.tolist()
        random = [
            transforms.RandomCrop(data.images.shape[2], padding=PADDING),
            transforms.RandomHorizontalFlip(),
        ]
        fixed = [transforms.ToTensor(), transforms.Normalize(data.mean, data.std)]
        self._transform = transforms.Compose([*(random if augment else []), *fixed])

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self._transform(Image.fromarray(self._arrays[index])), self._labels[index]


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
