"""A worker's heartbeat: its step and operation, in shared memory that other processes can read."""

import mmap
import os
import struct
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

DEVICE_WAIT = "device wait"
"""The host waits until its GPU has done all that was given to it, and spins meanwhile: it looks
busy from outside."""
COMPILING = "compile"
"""torch.compile is at work, within a step or anywhere else."""
EVALUATING = "evaluate"
"""An evaluation; a signal ends it between two of its batches."""
STEPPING = frozenset(("data", "step", "agree", DEVICE_WAIT))
"""Operations that make up a step. All others (a snapshot, an evaluation, a script's own code
between two passes) may rightly last longer."""

_NOTE = struct.Struct("<qqqqddddd56s32s")
_STEP, _BEGUN, _WAITS, _COUNTED, _TOTAL_S, _DATA_S, _WAITING_S, _LAP_S, _SNAPSHOT_S = range(9)
_OPERATION, _COLLECTIVE = slice(72, 128), slice(128, 160)
_NO_STEP = -1
_UNMEASURED_S = 2.0
"""For what follows on the last snapshot, such as the summary."""


_LONGER_S = {COMPILING: 60.0, EVALUATING: 30.0}
"""For the rest of what is being compiled, or of an evaluation's batch: by no step are they known.
A training that is killed there loses its epoch."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A worker's heartbeat, as another process reads it."""

    step: int | None = None
    """The step that is being computed; None before the first."""
    operation: str = ""
    collectives: int = 0
    """How many collectives the worker has begun; every worker counts them alike."""
    collective: str = ""
    """The collective that it is in, and may be waiting in; empty where it is in none."""
    steps: int = 0
    """Steps that the times are about: all that were finished at the last exchange."""
    total_s: float = 0.0
    """Time of these steps; of which"""
    data_s: float = 0.0
    """was spent waiting for data,"""
    waiting_s: float = 0.0
    """and waiting for other workers. The rest was spent computing."""
    lap_s: float = 0.0
    """Between the last two exchanges of signals: a second, or one step that is longer."""
    snapshot_s: float = 0.0
    """What the last snapshot took, from its copy in memory to the disk."""

    @property
    def stop_s(self) -> float:
        """How long the worker takes to stop, with as much again in reserve."""
        longer_s = _LONGER_S.get(self.operation, 0.0)
        return 2.0 * (self.lap_s + self.snapshot_s) + _UNMEASURED_S + longer_s


@final
class StepNote:
    """A worker's own heartbeat: what it is doing right now, for processes that watch it.

    Setting a field writes a few bytes of shared memory, which can still be read when the worker
    hangs or was killed. Cheap enough for every step (under a microsecond).
    """

    def __init__(self) -> None:
        self.is_shared = False
        """Whether another process reads the note."""
        self.has_begun = False
        """Whether this process has begun to train; known to it alone."""
        self._collective = ""
        self._hold(bytearray(_NOTE.size))
        self.step = None

    @property
    def step(self) -> int | None:
        """The step that is being computed; None before the first."""
        step = self._numbers[_STEP]
        return None if step == _NO_STEP else step

    @step.setter
    def step(self, value: int | None) -> None:
        self._numbers[_STEP] = _NO_STEP if value is None else value

    @property
    def operation(self) -> str:
        """The operation, such as `step` or `snapshot`; at most 56 bytes are kept."""
        return _text(bytes(self._memory[_OPERATION]))

    @operation.setter
    def operation(self, value: str) -> None:
        self._memory[_OPERATION] = _padded(value, 56)

    def begin(self, step: int) -> None:
        """Begin a step."""
        self._numbers[_STEP] = step
        self._memory[_OPERATION] = _IN_STEP

    def enter(self, collective: str) -> None:
        """Count a collective and note that the worker is in it; by all workers in one order.

        Args:
            collective: Its name; at most 32 bytes are kept.
        """
        numbers = self._numbers
        # Not atomic: a reader in between sees the new number with the old name for an instant.
        numbers[_BEGUN] += 1
        numbers[_WAITS] = 1
        if collective != self._collective:
            self._collective = collective
            self._memory[_COLLECTIVE] = _padded(collective, 32)

    def leave(self) -> None:
        """Note that the collective is over."""
        self._numbers[_WAITS] = 0

    def count(self, steps: int, total_s: float, data_s: float, waiting_s: float) -> None:
        """Add the steps of a lap to the sums: their number, and where their time went.

        Args:
            data_s: The part of it spent waiting for data.
            waiting_s: The part of it spent waiting for other workers.
        """
        self._numbers[_COUNTED] += steps
        seconds = self._seconds
        seconds[_TOTAL_S] += total_s
        seconds[_LAP_S] = total_s
        seconds[_DATA_S] += data_s
        seconds[_WAITING_S] += waiting_s

    @property
    def snapshot_s(self) -> float:
        """What the last snapshot took, from its copy in memory to the disk."""
        return self._seconds[_SNAPSHOT_S]

    @snapshot_s.setter
    def snapshot_s(self, value: float) -> None:
        self._seconds[_SNAPSHOT_S] = value

    def share(self, path: Path) -> None:
        """Keep the note in a file from now on, where the launcher can read it."""
        with path.open("w+b") as file:
            self._move_to(file.fileno())

    def share_unnamed(self) -> Path | None:
        """Keep the note in memory without a name from now on, which is gone with this process.

        Returns:
            The path under which this user's other processes find it; None where there are no such
            paths (they are Linux's).
        """
        if not sys.platform.startswith("linux"):
            return None
        descriptor = os.memfd_create("paceline-note")
        self._move_to(descriptor)
        return Path(f"/proc/{os.getpid()}/fd/{descriptor}")

    def _move_to(self, descriptor: int) -> None:
        content = bytes(self._memory[:])
        os.write(descriptor, content)  # every byte: a hole might find the disk full later
        self._hold(mmap.mmap(descriptor, _NOTE.size))
        self.is_shared = True

    def _hold(self, memory: bytearray | mmap.mmap) -> None:
        self._memory = memory
        view = memoryview(memory).cast("B")
        self._numbers = view.cast("q")
        self._seconds = view.cast("d")


@cache
def _padded(text: str, size: int) -> bytes:
    return text.encode()[:size].ljust(size, b"\0")


def _text(content: bytes) -> str:
    return content.rstrip(b"\0").decode(errors="replace")


_IN_STEP = _padded("step", 56)

note = StepNote()
"""This process's own note; the trainer sets its fields."""


def read_note(path: Path) -> Reading:
    """Read the note of another process; an empty one where there is none (yet)."""
    try:
        return decode(path.read_bytes())
    except OSError:
        return Reading()


def decode(content: bytes) -> Reading:
    """Read a note's bytes; too few are an empty one."""
    if len(content) != _NOTE.size:
        return Reading()
    step, begun, waits, counted, *seconds, operation, name = _NOTE.unpack(content)
    total_s, data_s, waiting_s, lap_s, snapshot_s = seconds
    return Reading(
        step=None if step == _NO_STEP else step,
        operation=_text(operation),
        collectives=begun,
        collective=_text(name) if waits else "",
        steps=counted,
        total_s=total_s,
        data_s=data_s,
        waiting_s=waiting_s,
        lap_s=lap_s,
        snapshot_s=snapshot_s,
    )
