"""The assessment of a course on data-parallel training: a WideResNet on CIFAR-10."""

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.training.recipe import recipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from paceline.training.job import Job

_DATA = Path("data")


@recipe(
    epochs=40,
    global_batch=256,
    optimizer="novograd",
    betas=(0.95, 0.0),
    grad_averaging=True,
    lr=0.15,
    sync_batchnorm=True,
    target_accuracy=0.85,
    patience=2,
)
def cifar10_wideresnet(
    *,
    data_dir: Path = _DATA,
    download: bool = True,
    augment: bool = True,
    width: int = 10,
    dropout: float = 0.01,
) -> "Job":
    """CIFAR-10, 32x32: a wide residual network, NovoGrad, SyncBatchNorm, augmentation.

    Args:
        data_dir: Directory of `cifar-10-batches-py`, as torchvision leaves it.
        download: Download missing files by torchvision (170 MB).
        augment: Flip, rotate, shear, scale and recolour training images, by torchvision.
        width: Multiplies the network's 16, 32 and 64 channels.
        dropout: Share of features left out in training, in each block.
    """
    from paceline.data.datasets import load_dataset
    from paceline.data.memory import TransformedImages
    from paceline.models.wideresnet import WideResNet
    from paceline.training.job import Job

    train, test = load_dataset("CIFAR10", data_dir, download)
    return Job(
        model=WideResNet(3, width=width, dropout=dropout),
        channels_last=True,
        train=TransformedImages(train, _transform()) if augment else train,
        validation=test,
    )


def _transform() -> "Callable[[Tensor], object]":
    import torch
    from torchvision.transforms import v2

    half = (0.5, 0.5, 0.5)
    transform: Callable[[Tensor], object] = v2.Compose(
        [
            v2.ToPILImage(),
            v2.RandomHorizontalFlip(),
            v2.RandomRotation(10),
            v2.RandomAffine(0, shear=10, scale=(0.8, 1.2)),
            v2.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(half, half),
        ]
    )
    return transform
