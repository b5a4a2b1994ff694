"""Temporary files of this process and its workers, in one directory that no crash leaves behind.

Below the system's directory for such files a user has one, `paceline-<user>`, in which each process
that needs it has its own and a lock on it. What a killed process left is removed by the next one,
with its semaphores: the kernel has released its lock, in whatever container it ran.
"""

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import process, util
from pathlib import Path

_KEY = "tempdir"  # as multiprocessing names it, for itself and for what is started with it
_SEMAPHORES_KEY, _THEIR_SEMAPHORES = "semprefix", "/mp"
_SHARED_MEMORY = Path("/dev/shm")  # where Linux has named semaphores, each as a file
_LOCK = ".lock"
_TRIES = 5
_LONGEST = 55
"""Of a directory for temporary files: a socket's path has 103 bytes at most, everywhere."""
_SHORT = "/tmp"
_LAST = -100  # as multiprocessing removes its own: when no child is left


@contextmanager
def scratch_directory() -> Iterator[Path]:
    """Make a directory for the length of a block, and remove it."""
    path = Path(tempfile.mkdtemp(dir=own_directory()))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def own_directory() -> Path:
    """Give this process's directory, made at the first call and removed with the process.

    It is a worker's launcher's. multiprocessing uses it as well, for the sockets of fork servers
    and loaders, and its semaphores have its name.
    """
    shared = vars(process.current_process())["_config"]
    if shared.get(_KEY) is None:
        made = _claim(_base())
        if made is None:
            return Path(util.get_temp_dir())
        path, locks = made
        util.Finalize(None, _remove, args=(path, locks, shared), exitpriority=_LAST)
        shared[_KEY], shared[_SEMAPHORES_KEY] = str(path), _semaphores_of(path)
    return Path(shared[_KEY])


@contextmanager
def own_directory_is(path: Path) -> Iterator[None]:
    """Have another directory, which the caller removes, be this process's for the block's length.

    A fork server has to run before: its socket stays where it is.
    """
    shared = vars(process.current_process())["_config"]
    before, shared[_KEY] = shared.get(_KEY), str(path)
    try:
        yield
    finally:
        shared[_KEY] = before


def _semaphores_of(path: Path) -> str:
    """Give the beginning of the names of a process's semaphores; macOS takes 30 characters."""
    return f"/paceline-{path.name}"


def _base() -> Path | None:
    """Make the user's directory, or check it; None where it belongs to another user."""
    top = tempfile.gettempdir()
    if len(os.fsencode(top)) > _LONGEST:
        top = _SHORT
    path = Path(top, f"paceline-{os.geteuid()}")
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError:
        return None
    private = stat.S_ISDIR(status.st_mode) and not status.st_mode & 0o077
    return path if private and status.st_uid == os.geteuid() else None


def _claim(base: Path | None) -> tuple[Path, tuple[int, int]] | None:
    """Remove directories of processes that were killed, and make one with a lock.

    Returns:
        The directory and the files that hold its locks as long as they are open; None where files
        can't be locked.
    """
    if base is None:
        return None
    # By each new process, since one that was killed cleans up nothing itself.
    _remove_stale(base)
    for _ in range(_TRIES):
        path = base / secrets.token_hex(4)
        with suppress(OSError):
            lock = _new_lock(path)
            if lock is not None:
                path.mkdir(mode=0o700)
                return path, (lock, _keep(path))
    return None


def _new_lock(path: Path) -> int | None:
    """Lock a new file beside a directory's path; None where another process removed it."""
    name = path.with_suffix(_LOCK)
    lock = os.open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Between open and flock another process may have removed the file; its name then belongs
        # to another file or none, and this lock protects nothing.
        if os.path.samestat(os.fstat(lock), name.stat()):
            return lock
    except OSError:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _keep(path: Path) -> int:
    """Lock the directory itself: systemd-tmpfiles, which removes what is ten days old, skips such
    (tmpfiles.d(5), Age), and a training may take longer.
    """
    held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return held


def _remove_stale(base: Path) -> None:
    """Remove the directories whose owners are gone, and with them their locks."""
    for name in base.glob(f"*{_LOCK}"):
        with suppress(OSError):
            lock = os.open(name, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                # Fails while the owner lives. The kernel frees the lock however the owner ends.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _unlink_semaphores(name.with_suffix(""))
                _remove_both(name.with_suffix(""))
            finally:
                os.close(lock)


def _unlink_semaphores(path: Path) -> None:
    """Remove those that a process left which was killed with its resource tracker."""
    for semaphore in _SHARED_MEMORY.glob(f"sem.{_semaphores_of(path).removeprefix('/')}-*"):
        with suppress(OSError):
            semaphore.unlink()


def _remove(path: Path, locks: tuple[int, int], shared: dict[str, str | None]) -> None:
    # While the lock is held: no other process removes the same directory meanwhile.
    _remove_both(path)
    for lock in locks:
        os.close(lock)
    shared[_KEY], shared[_SEMAPHORES_KEY] = None, _THEIR_SEMAPHORES


def _remove_both(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if not path.exists():  # else the next one tries again
        path.with_suffix(_LOCK).unlink(missing_ok=True)
