"""The UCI handwritten digits, shipped with the package: 1,797 images of 8x8, values 0 … 16."""

import io
from importlib.resources import files

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.memory import TensorData

_TEST_EVERY = 5
_SCALE = 16.0
_MEAN = (0.3053,)
_STD = (0.3760,)


def load_digits() -> tuple[TensorData, TensorData]:
    """Load the digits; every fifth image of each class is a test image, always the same ones.

    Returns:
        Training data (1,442 images) and test data (355 images), one channel.
    """
    packed = files("paceline.data").joinpath("files", "digits.npz").read_bytes()
    with np.load(io.BytesIO(packed), allow_pickle=False) as stored:
        images, labels = stored["images"], stored["labels"].astype(np.int64)
    test = holdout_mask(labels)
    return _select("digits", images, labels, ~test), _select("digits test", images, labels, test)


def holdout_mask(labels: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark every fifth sample of each class, in the order in which they stand."""
    mask = np.zeros(len(labels), dtype=np.bool_)
    for label in np.unique(labels):
        mask[np.flatnonzero(labels == label)[_TEST_EVERY - 1 :: _TEST_EVERY]] = True
    return mask


def _select(
    name: str, images: NDArray[np.uint8], labels: NDArray[np.int64], chosen: NDArray[np.bool_]
) -> TensorData:
    return TensorData(
        name=name,
        images=torch.from_numpy(images[chosen])[:, None],
        labels=torch.from_numpy(labels[chosen]),
        class_names=tuple(str(digit) for digit in range(10)),
        mean=_MEAN,
        std=_STD,
        scale=_SCALE,
    )
