"""Data-parallel training for PyTorch: the same training on any number of workers.

Names are imported when they are used, so that `import paceline` costs nothing.
"""

import importlib
from typing import TYPE_CHECKING

from paceline._version import __version__

if TYPE_CHECKING:
    from paceline.data.augment import RandomFlip, RandomShift
    from paceline.data.memory import TensorData
    from paceline.errors import PacelineError
    from paceline.trainer.job import Job
    from paceline.trainer.recipe import Recipe, recipe

_HOMES = {
    "Job": "paceline.trainer.job",
    "PacelineError": "paceline.errors",
    "RandomFlip": "paceline.data.augment",
    "RandomShift": "paceline.data.augment",
    "Recipe": "paceline.trainer.recipe",
    "TensorData": "paceline.data.memory",
    "recipe": "paceline.trainer.recipe",
}

__all__ = [
    "Job",
    "PacelineError",
    "RandomFlip",
    "RandomShift",
    "Recipe",
    "TensorData",
    "__version__",
    "recipe",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
