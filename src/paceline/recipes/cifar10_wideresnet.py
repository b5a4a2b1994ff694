"""The assessment of a course on data-parallel training: a WideResNet on CIFAR-10."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.training.recipe import recipe

if TYPE_CHECKING:
    from paceline.data.augment import Augment
    from paceline.training.job import Job

_DATA = Path("data")
_HALF = (0.5, 0.5, 0.5)


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
        data_dir: Directory of `cifar-10-batches-py` or of `cifar-10-python.tar.gz`.
        download: Fetch the archive from the internet if it is missing (170 MB).
        augment: Flip, turn, shear, scale and recolour training images.
        width: Multiplies the network's 16, 32 and 64 channels.
        dropout: Share of features left out in training, in each block.
    """
    from paceline.data.cifar import load_cifar10
    from paceline.models.wideresnet import WideResNet
    from paceline.training.job import Job

    train, test = load_cifar10(data_dir, download=download, report=print)
    return Job(
        model=WideResNet(3, width=width, dropout=dropout),
        channels_last=True,
        train=replace(train, mean=_HALF, std=_HALF),
        validation=replace(test, mean=_HALF, std=_HALF),
        augment=_augmentation() if augment else (),
    )


def _augmentation() -> "tuple[Augment, ...]":
    from paceline.data.affine import RandomAffine, Warp
    from paceline.data.augment import RandomFlip
    from paceline.data.jitter import ColorJitter

    return (
        Warp(RandomFlip(), RandomAffine(10), RandomAffine(shear=10, scale=(0.8, 1.2))),
        ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2),
    )
