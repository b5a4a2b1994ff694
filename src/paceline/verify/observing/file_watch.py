"""Files that a script reads and writes, as far as findings are about them."""

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist

from paceline.verify.events import FileRead, Wrote
from paceline.verify.observing.observer import Observer
from paceline.verify.patching import Patches
from paceline.verify.source_lines import caller

_TENSORS = frozenset({".pt", ".pth", ".ckpt", ".safetensors", ".npz"})
_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@final
@dataclass
class _FileWatch:
    observer: Observer
    is_on: bool = True
    _seen: set[str] = field(default_factory=set)

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        """Note what `open` is about to open."""
        if event == "open" and self.is_on:
            path, _, flags = arguments
            self.opened(path, writes=isinstance(flags, int) and bool(flags & _CHANGES))

    def opened(self, path: object, *, writes: bool) -> None:
        """Note a path of interest, each once."""
        if not isinstance(path, str | bytes | os.PathLike):  # a file descriptor, or a stream
            return
        full = Path(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 - `..` may be a link's
        if not (writes or full.suffix in _TENSORS) or str(full) in self._seen:
            return
        here = Path.cwd()
        is_below = full.is_relative_to(here)
        if is_below >= writes and not _is_cache(full.relative_to(here) if is_below else full):
            self._note(full, str(full.relative_to(here) if is_below else full), writes=writes)

    def _note(self, full: Path, shown: str, *, writes: bool) -> None:
        at = caller()
        if not at or full.is_relative_to(self.observer.trial.records):
            return
        self._seen.add(str(full))
        self.is_on = False  # for what noting opens itself
        try:
            before_group = not dist.is_initialized()
            self.observer.record(Wrote(shown, at, before_group) if writes else FileRead(shown, at))
        finally:
            self.is_on = True


def _is_cache(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def watch_files(observer: Observer, patches: Patches) -> None:
    """Note files that the script opens, as long as the patches last."""
    watch = _FileWatch(observer)
    # An audit hook stays for as long as the process does.
    sys.addaudithook(watch.audit)
    patches.callback(setattr, watch, "is_on", False)
    # PyTorch writes in C++, which audits nothing.
    patches.before(torch, "save", lambda _, f, *__, **___: watch.opened(f, writes=True))
