"""Imported by every Python with this directory on its path: what comes with torch and Paceline."""

import sys
from types import ModuleType

from tests.pretend_gpu.device.afterwards import After


def _after_torch(torch: ModuleType) -> None:
    from tests.pretend_gpu.device.arithmetic import install

    install()


def _after_engine(engine: ModuleType) -> None:
    from tests.pretend_gpu.device.steps import note_steps

    note_steps(engine)


sys.meta_path.insert(0, After("torch", _after_torch))
sys.meta_path.insert(0, After("paceline.training.engine", _after_engine))
