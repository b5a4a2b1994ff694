"""The recipes of the measurements: built-in ones, with stamps after every step."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import paceline
from paceline.recipes.digits import digits
from paceline.recipes.mnist import mnist

if TYPE_CHECKING:
    from paceline.training.job import Job


@paceline.recipe(**mnist.settings)
def stamped_mnist(
    *, data_dir: Path = Path("data"), stamps: Path = Path(), samples: int = 128
) -> "Job":
    """The mnist recipe, on the first samples of its data.

    Args:
        data_dir: Directory of the four MNIST files.
        stamps: Where the stamps go.
        samples: Training and test samples to use of each.
    """
    from benchmarks.stamps import stamp_steps
    from paceline.data.memory import TensorData

    stamp_steps(stamps)
    job = mnist.build(data_dir=data_dir, download=False)
    train, validation = (
        replace(data, images=data.images[:samples], labels=data.labels[:samples])
        for data in (job.train, job.validation)
        if isinstance(data, TensorData)
    )
    return replace(job, train=train, validation=validation)


@paceline.recipe(**{**digits.settings, "target_accuracy": None})
def stamped_digits(*, stamps: Path = Path()) -> "Job":
    """The digits recipe.

    Args:
        stamps: Where the stamps go.
    """
    from benchmarks.stamps import stamp_steps

    stamp_steps(stamps)
    return digits.build()
