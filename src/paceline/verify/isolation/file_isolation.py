"""Keeps what a verified training writes away from its user's files."""

import _io
import builtins
import errno
import io
import multiprocessing.process
import os
import shutil
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, final
from urllib.parse import quote, unquote, urlsplit

import safetensors
import safetensors.numpy
import safetensors.torch
import torch

from paceline.distributed.environment import set_variables
from paceline.verify.isolation.landlock import write_only_below
from paceline.verify.isolation.overlay import Overlay
from paceline.verify.patching import Patches
from paceline.verify.trial import Trial

_READING = ("stat", "access", "statvfs", "getxattr", "listxattr")
_READING_LINKS = ("lstat", "readlink")
_CHANGING = ("chmod", "chown", "lchown", "utime", "truncate", "setxattr", "removexattr")
_MAKING = ("mkdir", "mkfifo", "mknod")
_REMOVING = ("unlink", "remove", "rmdir")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_UNNAMED = getattr(os, "O_TMPFILE", -1)
_NATIVE_READERS = (
    (torch, "load", 0, "f"),
    (torch.jit, "load", 0, "f"),
    (safetensors, "safe_open", 0, "filename"),
    (safetensors.torch, "safe_open", 0, "filename"),
    (safetensors.numpy, "safe_open", 0, "filename"),
)
_NATIVE_WRITERS = (
    (torch, "save", 1, "f"),
    (torch.serialization, "save", 1, "f"),
    (torch.jit, "save", 1, "f"),
    (safetensors.torch, "serialize_file", 1, "filename"),
    (safetensors.numpy, "serialize_file", 1, "filename"),
)
"""What opens files in C++ or Rust: module, name, place and name of the path."""

Function = Callable[..., Any]
_PATHS = (str, bytes, os.PathLike)


@final
@dataclass
class Redirection:
    """Redirects the file operations of this process into an overlay."""

    overlay: Overlay

    def __post_init__(self) -> None:
        """Create the thread-local state."""
        self._own = threading.local()

    def install(self, patches: Patches) -> None:
        """Wrap Python's functions on files, and those known of other packages."""
        # Functions of `os`, grouped by what they do to a path.
        for name in (*_READING, *_READING_LINKS):
            self._hook(patches, os, name, partial(self._read, name not in _READING_LINKS))
        for name in _REMOVING:
            self._hook(patches, os, name, partial(self._remove, name == "rmdir"))
        for name in ("rename", "replace"):
            self._hook(patches, os, name, self._rename)
        rules: tuple[tuple[str, Function], ...] = (
            *((name, self._change) for name in _CHANGING),
            *((name, self._make) for name in _MAKING),
            ("chdir", self._change_directory),
            ("getcwd", self._working_directory),
            ("getcwdb", self._working_directory),
            ("link", self._link),
            ("symlink", self._symlink),
            ("listdir", self._list),
            ("scandir", self._scan),
            ("open", self._open_descriptor),
        )
        for name, rule in rules:
            self._hook(patches, os, name, rule)
        # The same `open` under its three names.
        for module in (builtins, io, _io):
            self._hook(patches, module, "open", self._open)
        self._hook(patches, sqlite3, "connect", self._connect)
        # Functions outside Python's own that take paths: only their arguments can be redirected.
        for reader, name, place, word in _NATIVE_READERS:
            self._hook(patches, reader, name, partial(self._native, place, word, False))
        for writer, name, place, word in _NATIVE_WRITERS:
            self._hook(patches, writer, name, partial(self._native, place, word, True))
        if hasattr(shutil, "_use_fd_functions"):  # rmtree by names, not by descriptors
            patches.put(shutil, "_use_fd_functions", False)

    def _hook(self, patches: Patches, owner: object, name: str, rule: Function) -> None:
        if hasattr(owner, name):  # not on every system
            patches.hook(owner, name, partial(self._by_rule, rule))

    def _by_rule(self, rule: Function, original: Function, *arguments: Any, **named: Any) -> Any:
        # Called from within a rule, whose paths are real ones.
        if getattr(self._own, "is_inside", False):
            return original(*arguments, **named)
        self._own.is_inside = True
        try:
            # Rules may use files themselves, untranslated; what the script asked for runs outside
            # of them.
            act = rule(original, *arguments, **named)
        finally:
            self._own.is_inside = False
        return self._call_redirected(act)

    def _call_redirected(self, act: Callable[[], Any]) -> Any:
        """Do what was asked for, and name files as the script does where that fails."""
        try:
            return act()
        except OSError as error:
            if isinstance(error.filename, str):
                error.filename = self.overlay.real_name(error.filename)
            raise

    # Each rule says what is to be done instead; the overlay's own calls aren't redirected.

    def _read(
        self, follow: bool, original: Function, path: Any, *more: Any, **named: Any
    ) -> Callable[[], Any]:
        follow = follow and bool(named.get("follow_symlinks", True))
        key = self._key(path, follow=follow, fd=named.get("dir_fd")) if self._is_used() else None
        if key is None:
            return partial(original, path, *more, **named)
        return partial(original, self.overlay.readable(key), *more, **_without_fd(named))

    def _change(self, original: Function, path: Any, *more: Any, **named: Any) -> Callable[[], Any]:
        follow = bool(named.get("follow_symlinks", True))
        key = self._key(path, follow=follow, fd=named.get("dir_fd"))
        if key is None:
            return partial(original, path, *more, **named)
        if self.overlay.visible(key) is None:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(path))
        return partial(original, self.overlay.writable(key, keep=True), *more, **_without_fd(named))

    def _make(self, original: Function, path: Any, *more: Any, **named: Any) -> Callable[[], Any]:
        key = self._key(path, follow=False, fd=named.get("dir_fd"))
        if key is None:
            return partial(original, path, *more, **named)
        return partial(original, self.overlay.place_of_new(key), *more, **_without_fd(named))

    def _remove(
        self, directory: bool, original: Function, path: Any, **named: Any
    ) -> Callable[[], Any]:
        key = self._key(path, follow=False, fd=named.get("dir_fd"))
        if key is None:
            return partial(original, path, **named)
        self.overlay.remove(key, directory=directory)
        return _nothing

    def _rename(
        self,
        original: Function,
        src: Any,
        dst: Any,
        *,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
    ) -> Callable[[], Any]:
        source = self._key(src, follow=False, fd=src_dir_fd)
        target = self._key(dst, follow=False, fd=dst_dir_fd)
        if source is not None and source == target:
            return _nothing
        before = src if source is None else self.overlay.lift(source)
        after = dst if target is None else self.overlay.make_way(target)
        original(before, after)
        if source is not None:
            self.overlay.moved_away(source)
        return _nothing

    def _change_directory(self, original: Function, path: Any) -> Callable[[], Any]:
        key = self._key(path, follow=True) if self._is_used() else None
        if key is None:
            return partial(original, path)
        # The real one where it is there: C code and other programs see only that.
        return partial(original, self.overlay.readable(key, real=True))

    def _working_directory(self, original: Function) -> Callable[[], Any]:
        here = original()
        real = self.overlay.real_name(os.fsdecode(here))
        return lambda: os.fsencode(real) if isinstance(here, bytes) else real

    def _link(self, original: Function, src: Any, dst: Any, **named: Any) -> Callable[[], Any]:
        source = self._key(src, follow=False, fd=named.get("src_dir_fd"))
        target = self._key(dst, follow=False, fd=named.get("dst_dir_fd"))
        before = src if source is None else self.overlay.lift(source)
        after = dst if target is None else self.overlay.place_of_new(target)
        return partial(original, before, after)

    def _symlink(
        self, original: Function, src: Any, dst: Any, *more: Any, **named: Any
    ) -> Callable[[], Any]:
        key = self._key(dst, follow=False, fd=named.get("dir_fd"))
        if key is None:
            return partial(original, src, dst, *more, **named)
        return partial(original, src, self.overlay.place_of_new(key))

    def _list(self, original: Function, path: Any = ".") -> Callable[[], Any]:
        key = self._key(path, follow=True) if self._is_used() else None
        if key is None:
            return partial(original, path)
        names = self.overlay.names(key)
        is_bytes = isinstance(path, bytes)
        return lambda: [os.fsencode(name) for name in names] if is_bytes else names

    def _scan(self, original: Function, path: Any = ".") -> Callable[[], Any]:
        key = self._key(path, follow=True) if self._is_used() else None
        if key is None:
            return partial(original, path)
        names, text = self.overlay.names(key), os.fsdecode(path)
        # Each entry has the script's name for the file, and where the file is.
        places = [
            (os.path.join(text, n), self.overlay.readable(os.path.join(key, n))) for n in names
        ]
        is_bytes = isinstance(path, bytes)
        return lambda: _Entries([_Entry(*place, is_bytes=is_bytes) for place in places])

    def _open_descriptor(
        self, original: Function, path: Any, flags: int, *more: Any, **named: Any
    ) -> Callable[[], Any]:
        writes = bool(flags & _WRITES) or flags & _UNNAMED == _UNNAMED
        if not writes and not self._is_used():
            return partial(original, path, flags, *more, **named)
        follow = not flags & os.O_NOFOLLOW
        key = self._key(path, follow=follow, fd=named.get("dir_fd"))
        if key is None:
            return partial(original, path, flags, *more, **named)
        # Where the file is: as read through the overlay, new, or a copy that may be written.
        if not writes:
            place = self.overlay.readable(key)
        elif flags & os.O_CREAT and flags & os.O_EXCL:
            place = self.overlay.place_of_new(key)
        elif not flags & os.O_CREAT and self.overlay.visible(key) is None:
            # It doesn't exist: let the original raise its own error.
            place = self.overlay.readable(key)
        else:
            replaces = flags & os.O_CREAT and flags & os.O_TRUNC
            place = self.overlay.writable(key, keep=not replaces)
        return partial(original, place, flags, *more, **_without_fd(named))

    def _open(
        self, original: Function, file: Any, mode: str = "r", *more: Any, **named: Any
    ) -> Callable[[], Any]:
        as_given = partial(original, file, mode, *more, **named)
        # Descriptors, openers, and reading before anything was written need no translation.
        writes = any(letter in mode for letter in "wxa+")
        is_path = isinstance(file, _PATHS)
        if not is_path or named.get("opener") is not None or not (writes or self._is_used()):
            return as_given
        key = self._key(file, follow=True)
        if key is None:
            return as_given
        if not writes or ("r" in mode and self.overlay.visible(key) is None):
            place = self.overlay.readable(key)
        elif "x" in mode:
            place = self.overlay.place_of_new(key)
        else:
            place = self.overlay.writable(key, keep="w" not in mode)
        return partial(original, place, mode, *more, **named)

    def _connect(
        self, original: Function, database: Any, *more: Any, **named: Any
    ) -> Callable[[], Any]:
        text = os.fsdecode(database) if isinstance(database, _PATHS) else ""
        # With `uri`, the eighth argument, a name may be `file:PATH?QUERY`, percent-encoded.
        is_uri = bool(named.get("uri", more[6:7] == (True,))) and text.startswith("file:")
        scheme_and_path, mark, query = text.partition("?")
        path = unquote(urlsplit(scheme_and_path).path) if is_uri else text
        is_file = path not in ("", ":memory:") and not (is_uri and "mode=memory" in query)
        key = self._key(path, follow=True) if is_file else None
        if key is None:
            return partial(original, database, *more, **named)
        # A database is changed in place: it is copied as a whole when it is opened.
        place = self.overlay.writable(key, keep=True)
        name = f"file:{quote(os.fspath(place))}{mark}{query}" if is_uri else place
        return partial(original, name, *more, **named)

    def _native(
        self, place: int, word: str, writes: bool, original: Function, *given: Any, **named: Any
    ) -> Callable[[], Any]:
        path = named.get(word) if word in named else next(iter(given[place:]), None)
        key = self._key(path, follow=True) if writes or self._is_used() else None
        if key is None:
            return partial(original, *given, **named)
        found = self.overlay.writable(key, keep=False) if writes else self.overlay.readable(key)
        if word in named:
            return partial(original, *given, **{**named, word: found})
        return partial(original, *given[:place], found, *given[place + 1 :], **named)

    def _is_used(self) -> bool:
        return self.overlay.is_used()

    def _key(self, path: Any, *, follow: bool, fd: int | None = None) -> str | None:
        """Name a path; None where it is a descriptor, or left as it is."""
        if not isinstance(path, _PATHS) or not os.fspath(path):
            return None
        base = "" if fd is None else os.readlink(f"/proc/self/fd/{fd}")
        try:
            return self.overlay.key(path, follow=follow, base=base)
        except (FileNotFoundError, ValueError):
            return None  # no working directory, a NUL in the name: let the original say so


@final
class _Entry:
    """What `os.scandir` tells of a file: the script's name for it, and all else of the real one."""

    def __init__(self, path: str, place: str, *, is_bytes: bool) -> None:
        self.path: str | bytes = os.fsencode(path) if is_bytes else path
        self.name: str | bytes = os.path.basename(self.path)
        self._place = place

    def __fspath__(self) -> str | bytes:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        """As `os.DirEntry.is_dir`."""
        return os.path.isdir(self.path) and (follow_symlinks or not self.is_symlink())

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        """As `os.DirEntry.is_file`."""
        return os.path.isfile(self.path) and (follow_symlinks or not self.is_symlink())

    def is_symlink(self) -> bool:
        """As `os.DirEntry.is_symlink`."""
        return os.path.islink(self._place)

    def is_junction(self) -> bool:
        """As `os.DirEntry.is_junction`."""
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        """As `os.DirEntry.stat`."""
        return os.stat(self.path, follow_symlinks=follow_symlinks)

    def inode(self) -> int:
        """As `os.DirEntry.inode`."""
        return os.lstat(self._place).st_ino


@final
class _Entries:
    """What `os.scandir` returns."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self._left = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self

    def __next__(self) -> _Entry:
        return next(self._left)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End."""
        self._left = iter(())


def _without_fd(named: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in named.items() if name != "dir_fd"}


def _nothing() -> None:
    """Everything has been done."""


_SYSTEM = (Path("/dev"), Path("/proc"))
"""Writing here changes no files: terminals, GPUs, shared memory, a process's own settings."""
_MAX_FILES = 20_000
Seen = Mapping[str, tuple[int, int]]


@contextmanager
def writes_isolated(trial: Trial) -> Iterator[None]:
    """Have this process, and all that it starts, write into the verification's directory.

    What Python code writes elsewhere goes to an overlay that the launch's ranks share, and is found
    there again. What anything else writes elsewhere (C code, other programs) the kernel refuses
    where it can; that isn't undone when the block ends.
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
        overlay = Overlay(Path(trial.overlay), [Path(trial.place), *_existing()])
        Redirection(overlay).install(patches)
        yield


def files_below(directory: Path) -> Seen:
    """Note sizes and times of a directory's files, of the first 20,000."""
    found: dict[str, tuple[int, int]] = {}
    for top, _, names in os.walk(directory):
        for name in names:
            path = os.path.join(top, name)
            if len(found) == _MAX_FILES:
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
