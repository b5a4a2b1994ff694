"""Linux's Landlock: a process that forbids itself, and all that it starts, to write elsewhere.

Needs no privileges, and can't be undone. The kernel refuses, so it holds for C code and for other
programs as well. https://docs.kernel.org/userspace-api/landlock.html
"""

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""System call numbers, the same on every architecture."""
_VERSION_FLAG, _PATH_BENEATH, _NO_NEW_PRIVS = 1, 1, 38
_WRITE_FILE, _REFER, _TRUNCATE = 1 << 1, 1 << 13, 1 << 14
_ENTRIES = sum(1 << bit for bit in range(4, 13))
"""Removing directories and files, and making files, directories, links, sockets and devices."""


class _Ruleset(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def landlock_version() -> int:
    """Give the version of Landlock that this kernel speaks; 0 where it has none."""
    if not sys.platform.startswith("linux"):
        return 0
    return max(0, int(_libc().syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def write_only_below(directories: Sequence[Path]) -> bool:
    """Forbid this thread, and all threads and processes it starts, to write anywhere else.

    Modes, owners and times of files can still be changed, and before Linux 6.2 they can be
    truncated by name: Landlock doesn't cover these.

    Args:
        directories: Where writing stays allowed, everything below included.

    Returns:
        Whether it holds from now on; False where the kernel has no Landlock.

    Raises:
        OSError: The kernel has it and refused.
    """
    version = landlock_version()
    if not version:
        return False
    # Only rights that this kernel knows: an unknown one makes the call fail.
    handled = _WRITE_FILE | _ENTRIES
    handled |= (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    libc, rules = _libc(), _Ruleset(handled)
    ruleset = _called(libc.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.sizeof(rules), 0))
    try:
        for directory in directories:
            _allow(libc, ruleset, directory, handled)
        # Without privileges the kernel restricts only a process that can't gain any by setuid
        # programs.
        _called(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
        _called(libc.syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return True


def _allow(libc: ctypes.CDLL, ruleset: int, directory: Path, handled: int) -> None:
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        rule = _PathBeneath(handled, descriptor)
        _called(libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0))
    finally:
        os.close(descriptor)


def _called(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"Landlock: {os.strerror(number)}")
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)
