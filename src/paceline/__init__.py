"""Data-parallel training for PyTorch: the same training on any number of workers.

Names are imported when they are used, so that `import paceline` costs nothing.
"""

import importlib
import os
from typing import TYPE_CHECKING

from paceline._version import __version__

if TYPE_CHECKING:
    from paceline.data.augment import RandomFlip, RandomShift
    from paceline.data.memory import TensorData
    from paceline.errors import PacelineError
    from paceline.script.notebook import notebook_launcher
    from paceline.script.session import session
    from paceline.training.job import Job
    from paceline.training.recipe import Recipe, recipe
    from paceline.training.session import Session

# torch.cuda.is_available() then asks NVML, as device_count() does: CUDA's driver, once asked, can't
# be used by the workers that `notebook_launcher` forks from this process.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_HOMES = {
    "Job": "paceline.training.job",
    "PacelineError": "paceline.errors",
    "RandomFlip": "paceline.data.augment",
    "RandomShift": "paceline.data.augment",
    "Recipe": "paceline.training.recipe",
    "TensorData": "paceline.data.memory",
    "Session": "paceline.training.session",
    "notebook_launcher": "paceline.script.notebook",
    "recipe": "paceline.training.recipe",
    "session": "paceline.script.session",
}

__all__ = [
    "Job",
    "PacelineError",
    "RandomFlip",
    "RandomShift",
    "Recipe",
    "Session",
    "TensorData",
    "__version__",
    "notebook_launcher",
    "recipe",
    "session",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
