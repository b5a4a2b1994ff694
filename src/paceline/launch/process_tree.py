"""Lifetimes of processes: end with the parent, adopt orphans, free the shared memory they leave.

Loader processes pass batches on in shared memory. torch has a process of its own that frees it and
removes its directory 2 s after the last loader process has ended. A command that is over doesn't
wait for that, and when it kills that process, batches that nobody has taken would stay in memory
for good. So every loader process leaves its number in the launcher's directory of the attempt, and
the launcher frees what has that number.
"""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Literal, TextIO

# Linux's include/uapi/linux/prctl.h.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_FIRST_NAMESPACES = {"ipc": 0xEFFFFFFF, "pid": 0xEFFFFFFC}
"""PROC_IPC_INIT_INO and PROC_PID_INIT_INO of Linux's include/linux/proc_ns.h."""


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent process ends, however that ends.

    Args:
        parent: The parent's process id as the parent knows it. When it is gone already, this
            process ends at once.
    """
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL):
        # The parent may have ended before the request: then the kernel never sends the signal.
        if os.getppid() != parent:
            os._exit(128 + signal.SIGKILL)
    else:
        _watch_creator()


def start_apart(
    command: Sequence[str], out: TextIO, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, which ends with this process.

    Ctrl-C comes to this process alone, which passes it on once.

    Raises:
        OSError: It can't be started.
    """
    return subprocess.Popen(
        command,
        env=None if environment is None else dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )


def adopt_orphans(adopt: bool) -> None:
    """Make this process the parent of its descendants' orphans (Linux), so that it can end them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def in_first_namespace(kind: Literal["ipc", "pid"], proc: Path = Path("/proc")) -> bool:
    """Tell whether this process is in the namespace that Linux has made first, in no container's.

    Args:
        kind: Of namespace. `NSpid` in `/proc/self/status` doesn't tell: a container's `/proc` shows
            its own ids alone.
        proc: Where the kernel shows processes.
    """
    try:
        return (proc / "self" / "ns" / kind).stat().st_ino == _FIRST_NAMESPACES[kind]
    except OSError:
        return False


def _prctl(option: int, value: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    return int(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)) == 0


def _watch_creator() -> None:
    """Where the kernel doesn't help: a thread that waits for the process that started this one."""
    creator = parent_process()
    if creator is None:
        return

    def wait() -> None:
        creator.join()
        os._exit(128 + signal.SIGKILL)

    threading.Thread(target=wait, name="paceline-parent", daemon=True).start()


@cache
def spare_children_our_garbage() -> None:
    """Have processes that are forked from this one never collect what it has left to collect.

    That may hold what waits for a thread when it is taken apart (a store, a process group), and a
    forked process has no such thread: it would hang or crash. Call it before forking.
    """
    os.register_at_fork(after_in_child=gc.freeze)


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Collect no garbage meanwhile: imports leave next to none, but spend a sixth on looking."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


SCRATCH_VARIABLE = "PACELINE_SCRATCH"
_SHARED_MEMORY = Path("/dev/shm")
_NOTE = "shares-"


def note_sharing() -> None:
    """Note for the launcher that this process hands tensors over by shared memory."""
    if scratch := os.environ.get(SCRATCH_VARIABLE):
        with suppress(OSError):
            Path(scratch, f"{_NOTE}{os.getpid()}").touch()


def free_shared(scratch: Path) -> None:
    """Free what processes have handed over that left their number here, and have ended.

    A container that shares its host's memory (`--ipc=host`) but numbers processes by itself does
    nothing: the number may be that of another container's living process.
    """
    if in_first_namespace("ipc") and not in_first_namespace("pid"):
        return
    for note in scratch.glob(f"{_NOTE}*"):
        for path in _SHARED_MEMORY.glob(f"torch_{note.name.removeprefix(_NOTE)}_*"):
            path.unlink(missing_ok=True)
