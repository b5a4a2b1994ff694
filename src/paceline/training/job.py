"""`Job`, what a recipe returns: model, data and loss."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from paceline.data.augment import Augment
from paceline.data.memory import TensorData
from paceline.data.protocols import MapDataset

LossFunction = Callable[[Tensor, Tensor], Tensor]
LossName = Literal["cross_entropy", "nll"]
ImageSet = TensorData | MapDataset


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, its data and its loss; everything else is an option of the training.

    The function that builds it runs once on every worker, after the random generators have been
    seeded, so that every worker starts from the same weights.
    """

    model: nn.Module
    """On the CPU, in fp32; inputs (N, ...) to outputs, for classification (N, num_classes)."""

    train: ImageSet
    """`TensorData` is kept on the device; other data sets (map-style) go through a DataLoader."""

    validation: ImageSet
    """Evaluated after every epoch, each sample exactly once."""

    channels_last: bool = False
    """Whether images and convolutions' weights are laid out channels-last: 1.5 times as fast on
    CPUs. A few shapes crash there in PyTorch 2.15, such as Conv2d(3, 16, 1, stride=2)."""

    loss: LossName | LossFunction = "cross_entropy"
    """(outputs, targets) -> mean over the samples, a scalar."""

    num_classes: int | None = None
    """Number of classes; None for a task that isn't classification (then no accuracy is taken).
    Taken from `train` where that is `Labelled`, as `TensorData` is."""

    augment: tuple[Augment, ...] = ()
    """Changes of training images on the device, random or not, for `TensorData`."""

    evaluate_with: tuple[Augment, ...] = ()
    """Changes of validation and test images on the device that aren't random, such as a resize."""

    test: ImageSet | None = None
    """Evaluated once at the end, with the best model by validation."""
