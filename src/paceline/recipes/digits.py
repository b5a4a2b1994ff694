"""The embedded default: handwritten digits that ship with the package."""

from typing import TYPE_CHECKING

from paceline.training.recipe import recipe

if TYPE_CHECKING:
    from paceline.training.job import Job


@recipe(
    epochs=15,
    global_batch=64,
    optimizer="sgd",
    lr=0.05,
    momentum=0.9,
    nesterov=True,
    weight_decay=5e-4,
    schedule="cosine",
    warmup_epochs=1.0,
    target_accuracy=0.975,
    patience=2,
)
def digits(*, dropout: float = 0.2, shift: int = 1) -> "Job":
    """UCI handwritten digits, 8x8, in the package: a small conv net, trains in seconds.

    Args:
        dropout: Share of features left out in training.
        shift: Training images are shifted by up to so many pixels; 0 for none.
    """
    from paceline.data.augment import RandomShift
    from paceline.data.digits import load_digits
    from paceline.models.digits_net import DigitsNet
    from paceline.training.job import Job

    train, test = load_digits()
    augment = (RandomShift(shift),) if shift else ()
    return Job(
        model=DigitsNet(dropout), channels_last=True, train=train, validation=test, augment=augment
    )
