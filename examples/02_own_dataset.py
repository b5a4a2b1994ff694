"""The same with a data set of your own: any map-style data set, read by loader processes.

paceline train examples/02_own_dataset.py:build --workers 2 --loader-workers 1
"""

import torch
from torch import Tensor, nn

import paceline


class Bars:
    """Draws an image when it is asked for; a real data set would read and transform a file."""

    def __init__(self, samples: int, seed: int, noise: int = 156) -> None:
        generator = torch.Generator().manual_seed(seed)  # the same bars on every worker
        self.labels = torch.randint(2, (samples,), generator=generator)
        self.bars = torch.randint(2, (samples, 16, 1), generator=generator)
        self.noise = noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Draw one sample; its random numbers follow from seed, epoch and index alone."""
        rows = self.bars[index].expand(16, 16)
        bars = rows.mT if self.labels[index] == 1 else rows
        image = 100 * bars + torch.randint(self.noise, (16, 16))
        return (image / 255 - 0.5).unsqueeze(0) / 0.25, self.labels[index]


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
        model=model, train=Bars(samples, seed=1), validation=Bars(500, seed=2), num_classes=2
    )
