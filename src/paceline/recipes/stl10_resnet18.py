"""The training of a tutorial on data-parallel training over EC2 nodes: ResNet-18 on STL-10."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.training.recipe import recipe

if TYPE_CHECKING:
    from paceline.training.job import Job

_DATA = Path("data")
_HALF = (0.5, 0.5, 0.5)


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
        data_dir: Directory of `stl10_binary` or of `stl10_binary.tar.gz`.
        download: Fetch the archive from the internet if it is missing (2.6 GB).
        size: Height and width to which the device resizes each batch, in pixels.
    """
    import torchvision

    from paceline.data.crop import Resize
    from paceline.data.stl10 import load_stl10
    from paceline.training.job import Job

    train, test = load_stl10(data_dir, download=download, report=print)
    resize = (Resize((size, size)),)
    return Job(
        model=torchvision.models.resnet18(weights=None, num_classes=train.num_classes),
        channels_last=True,
        train=replace(train, mean=_HALF, std=_HALF),
        validation=replace(test, mean=_HALF, std=_HALF),
        augment=resize,
        evaluate_with=resize,
    )
