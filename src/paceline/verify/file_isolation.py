"""Keeps what a verified training writes away from its user's files."""

import multiprocessing.process
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from paceline.distributed.environment import set_variables
from paceline.verify.file_redirect import Redirection
from paceline.verify.landlock import write_only_below
from paceline.verify.overlay import Overlay
from paceline.verify.patching import Patches
from paceline.verify.trial import Trial

_SYSTEM = (Path("/dev"), Path("/proc"))
"""Writing here changes no files: terminals, GPUs, shared memory, a process's own settings."""
_MOST_FILES = 20_000
Seen = Mapping[str, tuple[int, int]]


@contextmanager
def held_back(trial: Trial) -> Iterator[None]:
    """Have this process, and all that it starts, write into the verification's directory.

    What Python code writes elsewhere goes to an overlay that the launch's ranks share, and is found
    there again. What anything else writes elsewhere (C code, other programs) the kernel refuses
    where it can; that isn't undone when the block ends.

    Args:
        trial: Of this launch.
    """
    if not trial.place:
        yield
        return
    _use_own_caches(Path(trial.place) / "t")  # short: names of sockets have 108 characters at most
    if trial.confines:
        # The launcher's, in which readers of a DataLoader would make sockets.
        multiprocessing.process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
        write_only_below([Path(trial.place), *_existing()])
    with Patches() as patches:
        overlay = Overlay(Path(trial.records) / "overlay", [Path(trial.place), *_existing()])
        Redirection(overlay).install(patches)
        yield


def files_below(directory: Path) -> Seen:
    """Note sizes and times of a directory's files, of the first 20,000."""
    found: dict[str, tuple[int, int]] = {}
    for top, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(top, name)
            if len(found) == _MOST_FILES:
                return found
            try:
                status = os.lstat(path)
            except OSError:
                continue
            found[path] = (status.st_size, status.st_mtime_ns)
    return found


def changes(before: Seen, after: Seen) -> list[str]:
    """Name the files that are new, gone or not what they were. Pure."""
    return sorted(path for path in {*before, *after} if before.get(path) != after.get(path))


def _use_own_caches(directory: Path) -> None:
    """Keep caches, which C code reads and writes by itself, among the verification's files."""
    directory.mkdir(parents=True, exist_ok=True)
    names = ("TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "CUDA_CACHE_PATH", "MPLCONFIGDIR")
    caches = {name: str(directory / name.lower()) for name in names}
    more = {"TMPDIR": str(directory), "PYTHONDONTWRITEBYTECODE": "1", "WANDB_MODE": "disabled"}
    set_variables({**caches, **more})
    tempfile.tempdir = None  # it remembers the launcher's
    sys.dont_write_bytecode = True


def _existing() -> list[Path]:
    return [path for path in _SYSTEM if path.is_dir()]
