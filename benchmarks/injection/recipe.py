"""The training that faults are done to, as a recipe: digits with BatchNorm, Dropout and shifts."""

from pathlib import Path
from typing import TYPE_CHECKING

import paceline

if TYPE_CHECKING:
    from torch import Tensor


@paceline.recipe(epochs=4, global_batch=64, optimizer="sgd", lr=0.05, momentum=0.9)
def disturbed(*, room: Path = Path()) -> "paceline.Job":
    """Handwritten digits, with a fault inside.

    Args:
        room: Where the driver leaves what is to happen.
    """
    import torch.nn.functional as F

    from benchmarks.injection.inside import Inside
    from paceline.data.augment import RandomShift
    from paceline.data.digits import load_digits
    from paceline.models.digits_net import DigitsNet

    inside = Inside(room)
    inside.begin()
    model = DigitsNet(0.2)
    model.register_forward_pre_hook(inside.before_forward)

    def loss(outputs: "Tensor", targets: "Tensor") -> "Tensor":
        return inside.changed(F.cross_entropy(outputs, targets))

    train, test = load_digits()
    return paceline.Job(
        model=model,
        train=train,
        validation=test,
        augment=(RandomShift(1),),
        loss=loss,
        num_classes=10,
    )
