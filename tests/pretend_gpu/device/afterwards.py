"""Does something more once a module has been imported."""

import importlib.abc
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AndMore(importlib.abc.Loader):
    """Imports a module as its own loader does, and does more."""

    def __init__(self, own: importlib.abc.Loader, more: Callable[[ModuleType], None]) -> None:
        self._own = own
        self._more = more

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._own.exec_module(module)
        self._more(module)


class After(importlib.abc.MetaPathFinder):
    """Does something once a module has been imported."""

    def __init__(self, module: str, more: Callable[[ModuleType], None]) -> None:
        self._module = module
        self._more = more

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._module:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _AndMore(spec.loader, self._more)
        return spec
