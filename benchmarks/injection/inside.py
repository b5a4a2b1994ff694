"""What a disturbed training carries inside: stamps, a place to be held at, and one fault.

The driver writes `fault.json` and `hold` into the training's room; its workers read them. A fault
happens once: whoever makes the file `happened` first does it.
"""

import contextlib
import ctypes
import json
import os
import re
import resource
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.stamps import Stamper

Place = Literal["build", "forward", "validation", "loss", "sample", "step"]

FAULT, HAPPENED, HOLD, STAMPS, SYNCING = "fault.json", "happened", "hold", "stamps", "syncing"
_HELD_S = 60.0
_MB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault that a worker does to itself."""

    do: str
    """A name of `ACTS`."""
    where: Place
    rank: int
    step: int = 0
    """Optimizer steps of its process before it."""

    def write(self, room: Path) -> None:
        """Have the workers that start from now on do it, once."""
        (room / HAPPENED).unlink(missing_ok=True)
        (room / FAULT).write_text(json.dumps(asdict(self)))


@final
class Inside:
    """A worker's own end of it; made while the training is built."""

    def __init__(self, room: Path) -> None:
        """Args:
        room: The directory that the driver and all workers share.
        """
        self._room = room
        self._rank = int(os.environ.get("RANK", "0"))
        self._steps = self._passes = 0
        self._fault: Fault | None = None
        with contextlib.suppress(FileNotFoundError):
            self._fault = Fault(**json.loads((room / FAULT).read_text()))

    def begin(self) -> None:
        """Stamp this process, follow its optimizer steps, and do what is due at the start."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        if (self._room / SYNCING).is_dir() and self._rank == 0:
            slow_down_syncing(self._room / SYNCING)
        self._stamper = Stamper(self._room / STAMPS)
        register_optimizer_step_post_hook(self._after_step)
        self.pass_by("build")

    def before_forward(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Pass by; a hook of the model."""
        self.pass_by("forward" if module.training else "validation")

    def changed(self, loss: Tensor) -> Tensor:
        """Give the loss, or NaN where that is the fault."""
        return loss * float("nan") if self.pass_by("loss") else loss

    def pass_by(self, where: Place) -> bool:
        """Do the fault where it is due here; tell whether it was done."""
        fault = self._fault
        if fault is None or fault.where != where or fault.rank != self._rank:
            return False
        self._passes += 1
        # A loader's process takes no steps: there samples count.
        if (self._passes if where == "sample" else self._steps) < fault.step:
            return False
        self._fault = None
        try:
            (self._room / HAPPENED).touch(exist_ok=False)
        except FileExistsError:
            return False
        ACTS[fault.do]()
        return True

    def _after_step(self, *_: Any) -> None:
        self._steps += 1
        self._stamper.after_step()
        self._wait_while_held()
        self.pass_by("step")

    def _wait_while_held(self) -> None:
        """Go no further than the driver lets this training, so that its fault can't be missed."""
        deadline_s = time.monotonic() + _HELD_S
        while time.monotonic() < deadline_s:
            try:
                limit = int((self._room / HOLD).read_text() or "0")
            except (FileNotFoundError, ValueError):
                return
            if self._steps < limit:
                return
            time.sleep(0.01)


def slow_down_syncing(directory: Path) -> None:
    """Have every fsync of this process take a while, and leave a file in the directory before."""
    sync = os.fsync

    def slowly(descriptor: Any) -> None:
        (directory / f"{os.getpid()}-{time.monotonic_ns()}").touch()
        time.sleep(0.05)
        sync(descriptor)

    os.fsync = slowly  # type: ignore[assignment]  # the same, but for its parameter's name


def _raise() -> None:
    raise ValueError("boom")


def _raise_memory_error() -> None:
    raise MemoryError("boom")


def _keep_the_lock() -> None:
    re.match(r"(a?){40}a{40}", "a" * 40)  # takes ages without giving Python's lock away


def _one_collective_more() -> None:
    dist.barrier()


def _allocate_too_much() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (used + 200 * _MB, hard))
    torch.zeros(1000 * _MB, dtype=torch.uint8)


def _fill_the_memory() -> None:
    kept = [torch.ones(50 * _MB, dtype=torch.uint8) for _ in range(60)]
    raise AssertionError(f"{len(kept)} blocks fitted: there was no limit")


def _open_no_more_files() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))


def _write_anywhere() -> None:
    ctypes.string_at(0)


ACTS: Mapping[str, Callable[[], object]] = {
    "exit 0": lambda: os._exit(0),
    "exit 1": lambda: os._exit(1),
    "sys.exit": lambda: sys.exit(3),
    "raise": _raise,
    "memory error": _raise_memory_error,
    "nothing": lambda: None,
    "keep the lock": _keep_the_lock,
    "one collective more": _one_collective_more,
    "allocate too much": _allocate_too_much,
    "fill the memory": _fill_the_memory,
    "no more files": _open_no_more_files,
    "crash": _write_anywhere,
}
"""By name, so that a fault can be a line of JSON."""
