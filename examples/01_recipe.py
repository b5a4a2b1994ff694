"""The smallest recipe of your own: noisy images with bars along rows or along columns.

paceline train examples/01_recipe.py:build --workers 2
"""

import torch
from torch import Tensor, nn

import paceline


def draw_bars(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw uint8 images (samples, 1, 16, 16); class 0 has bars along rows, 1 along columns."""
    generator = torch.Generator().manual_seed(seed)  # the same images on every worker
    labels = torch.randint(2, (samples,), generator=generator)
    rows = 100 * torch.randint(2, (samples, 1, 16, 1), generator=generator).expand(-1, 1, 16, 16)
    bars = torch.where(labels.view(-1, 1, 1, 1) == 1, rows.mT, rows)
    noise = torch.randint(156, bars.shape, generator=generator)
    return (bars + noise).to(torch.uint8), labels


def in_memory(samples: int, seed: int) -> paceline.TensorData:
    """Say how the images are to be read; Paceline keeps them on the device."""
    images, labels = draw_bars(samples, seed)
    return paceline.TensorData(
        name="bars",
        images=images,
        labels=labels,
        class_names=("rows", "columns"),
        mean=(0.5,),
        std=(0.25,),
    )


@paceline.recipe(epochs=5, global_batch=64, lr=0.05, momentum=0.9)
def build(*, width: int = 8, samples: int = 2000) -> paceline.Job:
    """Bars along rows or along columns: a small convolutional network.

    Args:
        width: Channels of the convolution.
        samples: Training images.
    """
    model = nn.Sequential(
        nn.Conv2d(1, width, 5),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 2),
    )
    return paceline.Job(
        model=model, train=in_memory(samples, seed=1), validation=in_memory(500, seed=2)
    )
