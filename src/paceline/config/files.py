"""Files that a reader sees whole or not at all."""

import errno
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import StorageError

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


def fsync_directory(path: Path) -> None:
    """Make the names in a directory durable (a rename survives a power cut only after this)."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file so that readers, crashes and power cuts leave the old content or the new.

    Written under another name in the same directory, synced, renamed, directory synced.

    Raises:
        OSError: The disk is full or the directory can't be written; the old content stays.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        fsync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: object) -> None:
    """Write readable JSON atomically; NaN and infinity are refused rather than written as non-JSON.

    Raises:
        OSError: As `write_atomic`.
        ValueError: The content holds a number that JSON can't carry.
    """
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    write_atomic(path, text.encode())
