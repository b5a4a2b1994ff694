"""Files that a reader sees whole or not at all."""

import json
import os
import secrets
from pathlib import Path


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
