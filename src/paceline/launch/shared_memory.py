"""Shared memory that loader processes hand batches over in, and its end with the training.

torch leaves it to a process of its own, which frees it and removes its directory 2 s after the last
loader process has ended. A command that is over doesn't wait for that, and when it kills that
process, batches that nobody has taken would stay in memory for good. So every loader process leaves
its number in the launcher's directory of the attempt, and the launcher frees what has that number.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

import psutil

from paceline.launch.process_tree import in_first_namespace

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


def manager_directories(process: psutil.Process) -> list[Path]:
    """Name the temporary directory of torch's process that frees shared memory, if this is one."""
    try:
        if not process.name().startswith("torch_shm_manag"):  # the kernel keeps 15 letters
            return []
        sockets = [Path(str(c.laddr)) for c in process.net_connections("unix") if c.laddr]
    except psutil.Error:
        return []
    return sorted({s.parent for s in sockets if s.parent.name.startswith("torch-shm-dir-")})


def remove_directories(directories: list[Path]) -> None:
    """Remove the directories of such processes that were killed."""
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
