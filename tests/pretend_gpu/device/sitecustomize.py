"""Imported by every Python with this directory on its path: arithmetic comes with torch."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AndArithmetic(importlib.abc.Loader):
    """Imports torch as its own loader does, and does more."""

    def __init__(self, own: importlib.abc.Loader) -> None:
        self._own = own

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        from tests.pretend_gpu.device.arithmetic import install
        from tests.pretend_gpu.device.steps import note_steps

        install()
        note_steps()


class _AfterTorch(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _AndArithmetic(spec.loader)
        return spec


sys.meta_path.insert(0, _AfterTorch())
