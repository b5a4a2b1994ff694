"""Imported by every Python with this directory on its path: refuses waits in a training's steps."""

import sys
from types import ModuleType

from tests.pretend_gpu.device.afterwards import After


def _after_engine(engine: ModuleType) -> None:
    from tests.pretend_gpu.device.steps import refuse_waits_in_steps

    refuse_waits_in_steps(engine)


sys.meta_path.insert(0, After("paceline.training.engine", _after_engine))
