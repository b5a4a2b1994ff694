"""Files that a watched script saves, kept out of its user's way."""

import hashlib
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import final

import torch

from paceline.study.patching import Patches


@final
class SavedApart:
    """Has `torch.save` write to a directory of ours, and `torch.load` find it there again.

    A training that is only watched must not overwrite what the last real one has left.
    """

    def __init__(self, directory: Path) -> None:
        """Args:
        directory: Shared by the ranks of one launch.
        """
        self._directory = directory

    def install(self, patches: Patches) -> None:
        """Stand around `torch.save` and `torch.load`."""
        patches.wrap(torch, "save", self._around_save)
        patches.wrap(torch, "load", self._around_load)

    def _around_save(self, original: Callable[..., object]) -> Callable[..., object]:
        @wraps(original)
        def save(content: object, target: object, *more: object, **named: object) -> object:
            if isinstance(target, str | Path):
                self._directory.mkdir(exist_ok=True)
                target = self._place_of(target)
            return original(content, target, *more, **named)

        return save

    def _around_load(self, original: Callable[..., object]) -> Callable[..., object]:
        @wraps(original)
        def load(source: object, *more: object, **named: object) -> object:
            if isinstance(source, str | Path) and self._place_of(source).exists():
                source = self._place_of(source)
            return original(source, *more, **named)

        return load

    def _place_of(self, path: str | Path) -> Path:
        name = hashlib.sha256(str(Path(path).absolute()).encode()).hexdigest()[:16]
        return self._directory / name
