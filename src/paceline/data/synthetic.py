"""Random images of any size, for measuring; the same for equal arguments."""

import torch

from paceline.data.memory import TensorData
from paceline.data.splitmix import Domain, derive_key


def synthetic_images(
    samples: int, channels: int, height: int, width: int, classes: int, seed: int
) -> TensorData:
    """Make random images and labels; there is nothing in them to learn.

    Args:
        samples: Number of images.
        channels: Channels of an image.
        height: Pixels.
        width: Pixels.
        classes: Number of classes.
        seed: Another seed gives other data.

    Raises:
        ValueError: A size isn't positive.
    """
    if min(samples, channels, height, width, classes) < 1:
        raise ValueError("samples, channels, height, width and classes must be at least 1")
    generator = torch.Generator().manual_seed(derive_key(Domain.SYNTHETIC, seed) >> 1)
    shape = (samples, channels, height, width)
    return TensorData(
        name="synthetic",
        images=torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        labels=torch.randint(0, classes, (samples,), generator=generator),
        class_names=tuple(str(label) for label in range(classes)),
        mean=(0.5,) * channels,
        std=(0.29,) * channels,
    )
