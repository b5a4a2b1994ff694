"""The assessment of a course on data-parallel training: a WideResNet on CIFAR-10."""

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.training.recipe import recipe

if TYPE_CHECKING:
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
        augment: Flip training images, and crop them from a frame that is padded by 4 pixels.
        width: Multiplies the network's 16, 32 and 64 channels.
        dropout: Share of features left out in training, in each block.
    """
    from paceline.data.augment import RandomFlip, RandomShift
    from paceline.data.datasets import load_dataset
    from paceline.models.wideresnet import WideResNet
    from paceline.training.job import Job

    train, test = load_dataset("CIFAR10", data_dir, download)
    return Job(
        model=WideResNet(3, width=width, dropout=dropout),
        channels_last=True,
        train=train,
        validation=test,
        augment=(RandomFlip(), RandomShift(4)) if augment else (),
    )
