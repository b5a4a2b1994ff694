"""What the processes of a measured training tell about themselves, each in a small file.

Both sides of a comparison do the same: a hook that torch calls after every optimizer step.
"""

import os
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

_RECORD = struct.Struct("<qqddd")


@dataclass(frozen=True, kw_only=True)
class Stamp:
    """One process's news."""

    pid: int
    rank: int
    steps: int
    """Optimizer steps that this process has finished."""
    begun_s: float
    """When it built its model; seconds since the epoch."""
    first_step_s: float
    """When its first optimizer step was finished; 0 before."""
    last_step_s: float
    """When its last one was finished; 0 before."""


@final
class Stamper:
    """Writes this process's stamp."""

    def __init__(self, directory: Path) -> None:
        self._file = os.open(directory / f"{os.getpid()}.stamp", os.O_CREAT | os.O_WRONLY)
        self._rank = int(os.environ.get("RANK", "0"))
        self._steps = 0
        self._begun_s = time.time()
        self._first_step_s = self._last_step_s = 0.0
        self._write()

    def after_step(self, *_: Any) -> None:
        """Note one optimizer step; torch calls it."""
        self._steps += 1
        self._last_step_s = time.time()
        self._first_step_s = self._first_step_s or self._last_step_s
        self._write()

    def _write(self) -> None:
        times = self._begun_s, self._first_step_s, self._last_step_s
        os.pwrite(self._file, _RECORD.pack(self._rank, self._steps, *times), 0)


def stamp_steps(directory: Path) -> None:
    """Write a stamp now and after each of this process's optimizer steps."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(Stamper(directory).after_step)


def read_stamps(directory: Path) -> list[Stamp]:
    """Read what all processes have written so far, in the order in which they began."""
    found = []
    for path in directory.glob("*.stamp"):
        content = path.read_bytes()
        if len(content) == _RECORD.size:
            rank, steps, begun_s, first_s, last_s = _RECORD.unpack(content)
            found.append(
                Stamp(
                    pid=int(path.stem),
                    rank=rank,
                    steps=steps,
                    begun_s=begun_s,
                    first_step_s=first_s,
                    last_step_s=last_s,
                )
            )
    return sorted(found, key=lambda stamp: stamp.begun_s)


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll every millisecond.

    Raises:
        TimeoutError: It didn't come true in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{what} took more than {timeout_s:.0f} s")
        time.sleep(0.001)
