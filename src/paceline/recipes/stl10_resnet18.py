"""The training of a tutorial on data-parallel training over EC2 nodes: ResNet-18 on STL-10."""

from pathlib import Path
from typing import TYPE_CHECKING

from paceline.training.recipe import recipe

if TYPE_CHECKING:
    from paceline.training.job import Job

_DATA = Path("data")


@recipe(
    epochs=2,
    batch_per_worker=32,
    optimizer="sgd",
    lr=0.1,
    momentum=0.9,
    weight_decay=1e-4,
    schedule="step",
    step_epochs=30,
    step_factor=0.1,
)
def stl10_resnet18(*, data_dir: Path = _DATA, download: bool = True, size: int = 224) -> "Job":
    """STL-10, 96x96 resized to 224x224: torchvision's ResNet-18 from scratch, SGD.

    Args:
        data_dir: Directory of `stl10_binary`, as torchvision leaves it.
        download: Download missing files by torchvision (2.6 GB).
        size: Height and width to which the device resizes each batch, in pixels.
    """
    import torchvision

    from paceline.data.augment import Resize
    from paceline.data.datasets import load_dataset
    from paceline.training.job import Job

    train, test = load_dataset("STL10", data_dir, download)
    resize = (Resize((size, size)),)
    return Job(
        model=torchvision.models.resnet18(weights=None, num_classes=train.num_classes),
        channels_last=True,
        train=train,
        validation=test,
        augment=resize,
        evaluate_with=resize,
    )
