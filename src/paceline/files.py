"""Small files: written atomically, and read without trust in their content.

What is at a file's path may be a pipe, a device or of any size, and its JSON may be anything.
"""

import errno
import fcntl
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import BinaryIO

from paceline.errors import StorageError, UsageError

JSON_MAX_BYTES = 16 << 20
"""More than any JSON file of ours takes: `run.json` of 10,000 workers is a third of it."""
JSON_MAX_DEPTH = 100
_MAX_DIGITS = 100
_SHOWN = 40
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
    stat.S_IFSOCK: "a socket",
}
_UNWRITABLE = {
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_WRONG_PLACE = _UNWRITABLE - _FULL | {errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Say of what can't be written in the block that it can't be: a retry there is in vain.

    Args:
        path: What is written, where the error doesn't say.

    Raises:
        StorageError: A file system is full or read-only, or refuses.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _UNWRITABLE:
            raise
        where = error.filename or path
        raise StorageError(f"{where} can't be written: {error.strerror}") from error


@contextmanager
def writing(path: Path, *, hint: str = "") -> Iterator[None]:
    """Say of what a command can't write in the block that it can't, and why.

    For what a user names or a command is for; `storing` is for what a training writes.

    Args:
        path: The file or the directory, as the user knows it.
        hint: What helps against a full disk, as a sentence.

    Raises:
        UsageError: The place is a wrong one: read-only, missing, a directory, or not this user's.
        StorageError: The disk is full or fails.
    """
    try:
        yield
    except OSError as error:
        message = f"{path} can't be written: {error.strerror}"
        if error.errno in _WRONG_PLACE:
            raise UsageError(message) from error
        if error.errno in _FULL:
            raise StorageError(f"{message}. {hint}" if hint else message) from error
        raise


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable (a rename survives a power cut only after this)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


LOCK_NAME = ".download.lock"
"""File in a directory that `locked` holds."""


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock; the kernel frees it when its holder dies.

    Raises:
        OSError: The directory can't be written.
    """
    descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def mode_within(directory: Path) -> int:
    """Give the permissions of what is made in a directory: nobody's who may not enter that.

    A file has them without `x`. The process's umask takes away from them as usual.
    """
    return stat.S_IMODE(directory.stat().st_mode) & 0o777 | 0o700


def open_within(path: str, flags: int) -> int:
    """Open a file for `open(..., opener=open_within)`, with its directory's permissions."""
    return os.open(path, flags, mode_within(Path(path).parent) & 0o666)


@contextmanager
def replacing(
    path: Path,
    *,
    opener: Callable[[str, int], int] | None = None,
    temporary: Path | None = None,
) -> Iterator[BinaryIO]:
    """Write a file so that readers, crashes and power cuts leave the old content or the new.

    Written under another name in the same directory, synced, renamed, directory synced.

    Args:
        opener: As of `open`: by default the file has the user's usual mode.
        temporary: The other name.

    Raises:
        OSError: The disk is full or the directory can't be written; the old content stays.
    """
    aside = temporary or path.with_name(f".{path.name}.{os.urandom(4).hex()}")
    try:
        with open(aside, "xb", opener=opener) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
        fsync_directory(path.parent)
    except BaseException:
        with suppress(OSError):  # a directory that takes no file has none to remove
            aside.unlink()
        raise


def write_atomic(path: Path, content: bytes) -> None:
    """Write a small file as `replacing` does, with its directory's permissions.

    Raises:
        OSError: The disk is full or the directory can't be written; the old content stays.
    """
    with replacing(path, opener=open_within) as file:
        file.write(content)


def write_json(path: Path, content: object) -> None:
    """Write readable JSON atomically; NaN and infinity are refused rather than written as non-JSON.

    Raises:
        OSError: As `write_atomic`.
        ValueError: The content holds a number that JSON can't carry.
    """
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_atomic(path, text.encode())


def refuse_special(status: os.stat_result) -> None:
    """Refuse what isn't a plain file: reading it may never end.

    Raises:
        ValueError: It is something else; the message is a sentence without the path.
    """
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise ValueError(f"it is {kind}, not a plain file")


@contextmanager
def open_plain(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading; never waits for a pipe's writer.

    Raises:
        OSError: It can't be opened.
        ValueError: It isn't a plain file; the message is a sentence without the path.
    """
    # O_NONBLOCK: opening a pipe without a writer must not hang; plain files are read the same.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        refuse_special(os.fstat(descriptor))
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            yield file
    finally:
        os.close(descriptor)


def read_plain(path: Path, most_bytes: int = JSON_MAX_BYTES) -> bytes:
    """Read a small file whole; never waits for a pipe's writer and never reads without end.

    Args:
        path: The file, or a link to it.
        most_bytes: More than so many are refused.

    Raises:
        OSError: It can't be opened or read.
        ValueError: It isn't a plain file, or is larger; the message is a sentence without the path.
    """
    with open_plain(path) as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it is larger than {most_bytes:,} bytes, which no such file can be")
    return content


def parse_json(content: bytes | str) -> object:
    """Read JSON as `write_json` writes it, whoever has written it.

    Raises:
        ValueError: It isn't JSON in UTF-8, names something twice, is nested too deeply, or holds a
            number that is none (NaN), infinite or of more digits than make sense.
    """
    try:
        found: object = json.loads(
            content if isinstance(content, str) else content.decode(),
            object_pairs_hook=_each_once,
            parse_constant=_refuse_number,
            parse_float=_finite,
            parse_int=_whole,
        )
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    _check_depth(found)
    return found


def read_json(path: Path, most_bytes: int = JSON_MAX_BYTES) -> object:
    """Read a JSON file; see `read_plain` and `parse_json`.

    Raises:
        OSError: It can't be opened or read.
        ValueError: It isn't a plain file, too large, or not JSON.
    """
    return parse_json(read_plain(path, most_bytes))


def read_json_object(path: Path, most_bytes: int = JSON_MAX_BYTES) -> dict[str, object]:
    """Read a JSON file that holds an object.

    Raises:
        OSError: It can't be opened or read.
        ValueError: It isn't a plain file, too large, not JSON, or holds something else.
    """
    found = read_json(path, most_bytes)
    if not isinstance(found, dict):
        raise ValueError(f"it should hold a JSON object, not {describe_json(found)}")
    return found


def why_unreadable(error: OSError | ValueError) -> str:
    """Say why a file couldn't be read, without its path: the caller names that."""
    if isinstance(error, UnicodeDecodeError):
        return f"it isn't UTF-8 (byte {error.start})"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def describe_json(value: object) -> str:
    """Say what a value read from JSON is, in a few words."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return "a list"
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


_TOO_DEEP = f"it is nested more than {JSON_MAX_DEPTH} deep"


def _check_depth(found: object) -> None:
    """Refuse what our own code, which may recurse, couldn't walk through."""
    level, depth = [found], 0
    while level:
        if depth > JSON_MAX_DEPTH:
            raise ValueError(_TOO_DEEP)
        depth += 1
        level = [child for each in level for child in _children(each)]


def _children(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else ()


def _each_once(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it names {describe_json(twice)} twice")
    return found


def _refuse_number(text: str) -> float:
    raise ValueError(f"{text} is no number in JSON")


def _finite(text: str) -> float:
    if len(text) > _MAX_DIGITS or not isfinite(float(text)):
        raise ValueError(f"the number {text[:_SHOWN]}… is too large or too long")
    return float(text)


def _whole(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        raise ValueError(f"the number {text[:_SHOWN]}… has {len(text):,} digits")
    return int(text)
