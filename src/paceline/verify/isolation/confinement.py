"""Has a worker run in the copy of the project, and write nowhere else."""

import errno
import multiprocessing.process
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch

from paceline.distributed.environment import current_variables, set_variables
from paceline.verify.isolation.landlock import write_only_below
from paceline.verify.isolation.project_copy import ProjectCopy, denial
from paceline.verify.patching import Patches
from paceline.verify.trial import Trial

_CACHES = ("XDG_CACHE_HOME", "HF_HOME", "TORCH_HOME")
_COMPILED = (
    *("TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR"),
    *("CUDA_CACHE_PATH", "MPLCONFIGDIR"),
)
"""Caches that may be written where these are set; otherwise verify has its own."""
_SYSTEM = ("/dev", "/proc")
"""Terminals, GPUs, shared memory, a process's own settings."""
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES: Mapping[str, bool | None] = {
    **dict.fromkeys(("os.chmod", "os.chown", "os.utime", "os.rename", "os.link")),
    **dict.fromkeys(("os.truncate", "os.setxattr", "os.removexattr")),
    **dict.fromkeys(("os.mkdir", "os.symlink"), False),
    **dict.fromkeys(("os.remove", "os.rmdir", "shutil.rmtree"), True),
}
"""Audit events that name files: whether these must exist, or else must not."""
_FOLLOWING = ("os.chmod", "os.chown", "os.utime", "os.truncate", "os.setxattr", "os.removexattr")
_OF_ONE = _FOLLOWING[3:]
"""Those whose only path comes first, and which know no descriptor of a directory."""


def confine(trial: Trial) -> None:
    """Change to the copy of the project, and forbid to write elsewhere; this can't be undone.

    The kernel forbids it to all code where it has Landlock. Before that, and without, a hook stops
    Python's own functions, with a message that names the file.
    """
    place, copy = Path(trial.place), ProjectCopy(trial.project, trial.copy)
    # Temporary files, sockets of readers and caches of compilers belong to this verification.
    given = current_variables()
    own = {name: str(place / name.lower()) for name in _COMPILED if name not in given}
    if not (cache := Path.home() / ".cache").is_dir():
        own = {_CACHES[0]: str(place / "cache"), **own}
    directory = copy.path_in_copy(trial.directory)
    more = {"PWD": directory, "TMPDIR": str(place / "t"), "WANDB_MODE": "disabled"}
    set_variables({**own, **more, "PYTHONDONTWRITEBYTECODE": "1"})
    tempfile.tempdir, sys.dont_write_bytecode = None, True
    multiprocessing.process.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
    # The same files are imported by their copies, the environment's packages aren't.
    os.chdir(directory)
    copies = [(path, copy.path_in_copy(path)) for path in sys.path]
    sys.path[:] = [new if os.path.realpath(new) == new else old for old, new in copies]
    # Only what exists can be allowed.
    caches = (given[name] for name in (*_CACHES, *_COMPILED) if given.get(name))
    allowed = (place, cache, *map(Path, (*_SYSTEM, *caches, *trial.writable)))
    existing = [path.resolve() for path in allowed if path.is_dir()]
    write_only_below(existing)
    guard = _Guard(tuple(f"{path}".rstrip("/") for path in existing), copy)
    sys.addaudithook(guard.audit)
    Patches().before(torch, "save", guard.before_save)  # opens files in C++


@final
@dataclass(frozen=True)
class _Guard:
    """Raises PermissionError before a file is changed that must not be."""

    allowed: tuple[str, ...]
    copy: ProjectCopy

    def audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Check an event, of those in https://docs.python.org/3/library/audit_events.html."""
        if event == "open" and arguments[2] & _WRITES:
            self._check(arguments[0], follow=True)
        elif event in _CHANGES and (event in _OF_ONE or arguments[-1] in (-1, None)):
            # Others are relative to a descriptor; a symbolic link's first argument is its text.
            for path in arguments[event == "os.symlink" : 1 if event in _OF_ONE else 2]:
                self._check(path, follow=event in _FOLLOWING, exists=_CHANGES[event])

    def before_save(self, obj: object, f: object, *_: object, **__: object) -> None:
        """Check what `torch.save` is about to write."""
        self._check(f, follow=True)

    def _check(self, given: object, *, follow: bool, exists: bool | None = None) -> None:
        if not isinstance(given, str | bytes | os.PathLike):
            return  # a file that is open, a mode
        path = os.path.abspath(os.fsdecode(given))
        if exists not in (None, os.path.lexists(path)):
            return  # that fails with its own error
        directory, last = os.path.split(path)
        real = os.path.realpath(path) if follow else f"{os.path.realpath(directory)}/{last}"
        if not any(f"{real}/".startswith(f"{top}/") for top in self.allowed):
            name = self.copy.original(path)
            is_linked = path.startswith(self.copy.copy)
            raise PermissionError(errno.EACCES, denial(name, is_linked=is_linked))
