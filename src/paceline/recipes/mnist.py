"""The job that PyTorch's DDP articles train: a small CNN on MNIST with Adadelta."""

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.training.recipe import recipe

if TYPE_CHECKING:
    from paceline.training.job import Job

_DATA = Path("data")


@recipe(epochs=5, global_batch=64, optimizer="adadelta", lr=0.01)
def mnist(*, data_dir: Path = _DATA, download: bool = True) -> "Job":
    """MNIST, 28x28: two convolutions with BatchNorm, Adadelta, log-softmax.

    Args:
        data_dir: Directory of `MNIST/raw`, as torchvision leaves it.
        download: Download missing files by torchvision (12 MB).
    """
    from paceline.data.datasets import load_dataset
    from paceline.models.mnist_cnn import MnistCnn
    from paceline.training.job import Job

    train, test = load_dataset("MNIST", data_dir, download)
    return Job(model=MnistCnn(), channels_last=True, train=train, validation=test, loss="nll")
