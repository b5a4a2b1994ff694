"""Files that a watched script saves by torch.save, kept out of its user's way."""

import hashlib
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import final

import torch

from paceline.study.patching import Patches


@final
class SavedApart:
    """Has `torch.save` write to a directory of ours, and `torch.load` find it there again.

    A training that is only watched must not overwrite what the last real one has left. What was
    saved apart is renamed there too: scripts save under another name first, to be safe.
    """

    def __init__(self, directory: Path) -> None:
        """Args:
        directory: Shared by the ranks of one launch.
        """
        self._directory = directory

    def install(self, patches: Patches) -> None:
        """Stand around `torch.save`, `torch.load` and what renames files."""
        patches.wrap(torch, "save", self._around_save)
        patches.wrap(torch, "load", self._around_load)
        for name in ("replace", "rename"):  # pathlib and shutil call these
            patches.wrap(os, name, self._around_rename)

    def _around_save(self, original: Callable[..., object]) -> Callable[..., object]:
        @wraps(original)
        def save(obj: object, f: object, *more: object, **named: object) -> object:
            if isinstance(f, str | os.PathLike):
                self._directory.mkdir(exist_ok=True)
                f = self._place_of(f)
            return original(obj, f, *more, **named)

        return save

    def _around_load(self, original: Callable[..., object]) -> Callable[..., object]:
        @wraps(original)
        def load(f: object, *more: object, **named: object) -> object:
            if isinstance(f, str | os.PathLike) and self._place_of(f).exists():
                f = self._place_of(f)
            return original(f, *more, **named)

        return load

    def _around_rename(self, original: Callable[..., object]) -> Callable[..., object]:
        @wraps(original)
        def rename(src: object, dst: object, **named: object) -> object:
            if isinstance(src, str | os.PathLike) and isinstance(dst, str | os.PathLike):
                place = self._place_of(src)
                if place.exists():
                    return original(place, self._place_of(dst))
            return original(src, dst, **named)

        return rename

    def _place_of(self, path: str | os.PathLike[str]) -> Path:
        name = hashlib.sha256(str(Path(path).absolute()).encode()).hexdigest()[:16]
        return self._directory / name
