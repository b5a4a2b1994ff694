"""The training of a course on data-parallel training: a WideResNet on Fashion-MNIST."""

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.training.recipe import recipe

if TYPE_CHECKING:
    from paceline.training.job import Job

_DATA = Path("data")


@recipe(
    epochs=40,
    batch_per_worker=32,
    optimizer="sgd",
    lr=0.01,
    target_accuracy=0.85,
    patience=2,
)
def fashion_wideresnet(
    *, data_dir: Path = _DATA, download: bool = True, width: int = 10, dropout: float = 0.01
) -> "Job":
    """Fashion-MNIST, 28x28: a wide residual network with SGD, until 85 % are right.

    Args:
        data_dir: Directory of `FashionMNIST/raw`, as torchvision leaves it.
        download: Download missing files by torchvision (31 MB).
        width: Multiplies the network's 16, 32 and 64 channels.
        dropout: Share of features left out in training, in each block.
    """
    from paceline.data.datasets import load_dataset
    from paceline.models.wideresnet import WideResNet
    from paceline.training.job import Job

    train, test = load_dataset("FashionMNIST", data_dir, download)
    return Job(
        model=WideResNet(width=width, dropout=dropout),
        channels_last=True,
        train=train,
        validation=test,
    )
