"""Writes a snapshot's files, if possible over those of a snapshot that would be deleted.

Making and removing files costs training several times the processor's time that writing over them
does. It is done only with files that no other process has open and that have no other link.
"""

import contextlib
import fcntl
import hashlib
import os
import signal
import stat
from collections.abc import Callable, Iterable
from pathlib import Path

from paceline.checkpoint.manifest import FileEntry
from paceline.files import fsync_directory, open_within

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OVER = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_BLOCK_BYTES = 4096
_DIRECT = getattr(os, "O_DIRECT", 0)
_DIRECT_MIN_BYTES = 64 << 10
# Times aren't synced: they would cost an entry in the file system's journal.
_sync: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)


def write_file(path: Path, chunks: Iterable[memoryview], *, over: bool = False) -> FileEntry:
    """Write a file, hash it on the way, and wait until it is durable.

    Args:
        path: The file; a new one has its directory's permissions.
        chunks: Its content; all but the last in whole blocks, each at the start of a page where it
            is to go past the page cache.
        over: Write over the file that is there where nobody can notice; else it is replaced. A new
            file's name is durable only with this.

    Raises:
        OSError: It can't be written, or exists without `over`.
    """
    digest, size = hashlib.sha256(), 0
    descriptor = _old_file(path) if over else open_within(str(path), _NEW)
    try:
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            # Past the page cache where that works; what it leaves over, and short writes, go the
            # usual way.
            rest = _write_direct(descriptor, chunk)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        # The old file was longer.
        if over and os.fstat(descriptor).st_size != size:
            os.ftruncate(descriptor, size)
        _sync(descriptor)
    finally:
        os.close(descriptor)
    return FileEntry(bytes=size, sha256=digest.hexdigest())


def _old_file(path: Path) -> int:
    """Open the existing file, or a new one in its place if others have it open."""
    with contextlib.suppress(OSError):
        descriptor = os.open(path, _OVER)
        if is_held_by_nobody_else(descriptor):
            return descriptor
        os.close(descriptor)
    path.unlink(missing_ok=True)
    descriptor = open_within(str(path), _NEW)
    fsync_directory(path.parent)
    return descriptor


def is_held_by_nobody_else(descriptor: int) -> bool:
    """Say whether writing into a file changes nothing for anybody.

    It must be a plain file on a disk of this host and of one name (no hard link), and no process
    may have it open or mapped into memory, this one included. Who opens it later isn't known here.

    Args:
        descriptor: The file, opened for reading and writing.
    """
    status = os.fstat(descriptor)
    # Network file systems have no device of their own: what other hosts do isn't known here.
    if not stat.S_ISREG(status.st_mode) or status.st_nlink != 1 or os.major(status.st_dev) == 0:
        return False
    # The kernel gives a lease only where nobody else has the file open.
    try:
        # Who opens it meanwhile waits for the lease's end, and makes the kernel send us a signal:
        # one that is ignored, instead of SIGIO, which would end the process.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (OSError, AttributeError):  # the file system can't, or this isn't Linux
        return False
    return True


def _write_direct(descriptor: int, content: memoryview) -> memoryview:
    """Write whole blocks past the page cache where that can be done; give what is left to write.

    Copying into fresh pages of the cache and freeing them with an old snapshot takes several times
    the processor's time, which training needs.
    """
    whole = len(content) // _BLOCK_BYTES * _BLOCK_BYTES
    if not _DIRECT or whole < _DIRECT_MIN_BYTES:
        return content
    flags, written = fcntl.fcntl(descriptor, fcntl.F_GETFL), 0
    # Some file systems refuse it. What else may be wrong is met again by the ordinary write.
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | _DIRECT)
        written = os.write(descriptor, content[:whole])
    fcntl.fcntl(descriptor, fcntl.F_SETFL, flags)
    return content[written:]
