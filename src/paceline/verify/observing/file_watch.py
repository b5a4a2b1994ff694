"""Files that a script reads and writes, as far as findings are about them."""

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

import torch
import torch.distributed as dist
from torch.utils.data import get_worker_info

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

    def audit(self, event: str, arguments: tuple[object, ...]) -> None:
        """Note what `open` is about to open."""
        if event == "open":
            path, _, flags = arguments
            self.opened(path, writes=isinstance(flags, int) and bool(flags & _CHANGES))

    def opened(self, path: object, *, writes: bool) -> None:
        """Note a path of interest, each once."""
        if not self.is_on or not isinstance(path, str | bytes | os.PathLike):
            return  # a file descriptor, or a stream
        full = Path(os.path.abspath(os.fsdecode(path)))  # noqa: PTH100 - `..` may be a link's
        is_below = full.is_relative_to(here := Path.cwd())
        place = full.relative_to(here) if is_below else full
        # A checkpoint to go on from is read before the first batch; others are samples.
        is_data = self.observer.has_begun or get_worker_info() is not None
        is_wanted = is_below if writes else full.suffix in _TENSORS and not is_data
        is_hidden = any(part.startswith(".") or part == "__pycache__" for part in place.parts)
        if not is_wanted or is_hidden or full.is_relative_to(self.observer.trial.records):
            return
        self.is_on = False  # for what noting opens itself
        if (at := caller()) and self.observer.is_first("opened", full):
            kind = partial(Wrote, before_group=not dist.is_initialized()) if writes else FileRead
            self.observer.record(kind(str(place), at))
        self.is_on = True


def watch_files(observer: Observer, patches: Patches) -> None:
    """Note files that the script opens, as long as the patches last."""
    watch = _FileWatch(observer)
    # An audit hook stays for as long as the process does.
    sys.addaudithook(watch.audit)
    patches.callback(setattr, watch, "is_on", False)
    # PyTorch writes in C++, which audits nothing.
    patches.before(torch, "save", lambda _, f, *__, **___: watch.opened(f, writes=True))
