"""The status exchange: one small all-gather about once a second, for joint decisions.

Everything that depends on a clock, on a signal or on figures from the device is decided here, from
the same numbers on every worker, so that all of them stop, save and show the same. Ctrl-C and
SIGTERM become a flag, which is part of the status.
"""

import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from types import FrameType
from typing import final

import torch
from torch import Tensor

from paceline.data.batch import Batch
from paceline.distributed.group import Group
from paceline.distributed.work_division import Division
from paceline.errors import InterruptedTraining, JobError
from paceline.launch.signals import stops_handled
from paceline.metrics.counters import Totals

_EVERY_S = 1.0
_MAX_STEPS = 1000
NOTHING = torch.empty(0, dtype=torch.float64)
"""Where the status is all that there is to exchange."""


_PATIENCE_S = 1.5
"""Launchers kill a few seconds after the signal; ours after 3.5 at the earliest."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
"""SIGUSR2 is what Open MPI's mpirun passes on without ending its workers a second later."""


@final
class StopFlag:
    """Set by the first signal; in a process of its own, a second Ctrl-C interrupts at once."""

    def __init__(self, *, under_launcher: bool) -> None:
        """Start unset.

        Args:
            under_launcher: A launcher forwards and repeats signals, and kills when time is up: then
                repetitions mean nothing. Otherwise the second SIGINT raises KeyboardInterrupt.
        """
        self.name: str | None = None
        """The signal that was received, such as SIGTERM; None while there was none."""
        self.cut_short = False
        """Whether it ended this worker's part of an evaluation."""
        self._since_s = 0.0
        self._under_launcher = under_launcher
        self._process = os.getpid()
        self.handled: Sequence[signal.Signals] = ()
        """What sets it."""

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Forked processes inherit the handler: Ctrl-C is for the worker alone."""
        if os.getpid() != self._process:
            if number == signal.SIGTERM:  # as multiprocessing ends a process: has the usual effect
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            return
        if self.name is not None and number == signal.SIGINT and not self._under_launcher:
            raise KeyboardInterrupt
        if self.name is None:
            self._since_s = monotonic()
        self.name = signal.Signals(number).name

    @property
    def replaced(self) -> list[str]:
        """Signals that the script has set handlers of its own for since: they don't come here."""
        return [each.name for each in self.handled if signal.getsignal(each) != self.receive]

    @property
    def is_pressing(self) -> bool:
        """Whether a signal has been waiting for so long that the process may soon be killed."""
        return self.name is not None and monotonic() - self._since_s > _PATIENCE_S

    def until_signal(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Pass an evaluation's batches on, unless a signal leaves no time to finish it."""
        for batch in batches:
            if self.is_pressing:
                self.cut_short = True  # said to the others when they are done
                return
            yield batch


@contextmanager
def stop_on_signals(*, under_launcher: bool) -> Iterator[StopFlag]:
    """Catch the signals that end a training, for the length of it. Main thread only.

    A signal that this process was told to ignore (by nohup, or by the launcher) stays ignored.
    """
    flag = StopFlag(under_launcher=under_launcher)
    with stops_handled(flag.receive, _SIGNALS) as flag.handled:
        yield flag


@dataclass(frozen=True, kw_only=True)
class Status:
    """One worker's status since the last exchange."""

    signalled: bool
    """A signal asked this worker to stop."""
    bad_step: int | None
    """The first step whose loss isn't finite."""
    counted: Tensor
    """(parts of this worker, 4) float64: its sums of the epoch so far, see `Totals.as_row`."""
    lap_s: float
    """Time since the last exchange."""
    data_s: float
    """The part of it spent waiting for data."""
    waited_s: float = 0.0
    """Time of a step spent waiting for communication."""
    step_s: float = 0.0
    """Mean time of the newest steps."""
    step: int = 0
    """Steps done."""
    skipped: int = 0
    """Steps without a backward pass, of those that this process has done."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Result of a status exchange: the same on every worker."""

    signalled: bool
    bad: tuple[int, int] | None
    """Step and rank of the earliest loss that isn't finite."""
    totals: Totals
    """Sums of the epoch so far over all workers."""
    lap_s: float
    """Time since the last exchange by rank 0's clock: no two clocks are ever compared."""
    data_s: float
    """Longest wait for data among the workers."""
    step_s: float = 0.0
    """Mean time of the newest steps, of the slowest worker."""
    waits_s: tuple[float, ...]
    """Time of a step that each worker waits for communication, by rank."""
    counted: Tensor = field(compare=False)
    """(parts, 4) float64, in order: the sums of each part of a step, see `Totals.as_row`."""
    more: Tensor = field(compare=False)
    """(parts, K) float64, in order: what was given besides."""


def agree(status: Status, group: Group, division: Division, more: Tensor = NOTHING) -> Agreement:
    """Exchange the workers' status. Collective, blocks until every worker is there.

    Args:
        division: Which parts of a step each of them has.
        more: (most * K,) float64 on the CPU, as `Division.padded` makes it, passed on to all.

    Raises:
        JobError: The workers haven't taken the same steps.
    """
    bad_step = math.inf if status.bad_step is None else float(status.bad_step)
    times = torch.tensor(
        [
            status.step,
            status.skipped,
            status.signalled,
            bad_step,
            status.lap_s,
            status.data_s,
            status.waited_s,
            status.step_s,
        ],
        dtype=torch.float64,
    )
    # (world_size, 8 + most * (4 + K))
    rows = group.gather_rows(torch.cat([times, division.padded(status.counted), more]))
    steps, skips, signalled, bad_steps, laps_s, data_s, waits_s, steps_s = zip(
        *rows[:, :8].tolist(), strict=True
    )
    if len({*steps}) > 1 or len({*skips}) > 1:
        raise JobError(_describe_other_steps(group.rank, status))
    bad_step, bad_rank = min((step, rank) for rank, step in enumerate(bad_steps))
    rest = 8 + 4 * division.most
    counted = division.in_order(rows[:, 8:rest])
    return Agreement(
        signalled=any(signalled),
        bad=None if math.isinf(bad_step) else (int(bad_step), bad_rank),
        totals=Totals.from_row(counted.sum(0)),
        lap_s=laps_s[0],
        data_s=max(data_s),
        step_s=max(steps_s),
        waits_s=waits_s,
        counted=counted,
        more=division.in_order(rows[:, rest:]),
    )


def _describe_other_steps(rank: int, own: Status) -> str:
    """Say that a worker has left out a step that others have taken.

    Their exchanges are then not about the same step: what the others' rows hold may be part of
    another exchange, so that only this worker's own figures can be named.
    """
    return (
        f"the workers have not taken the same steps: rank {rank} has done {own.step}, "
        f"{own.skipped} of them without s.step(loss) or s.backward(loss), others as many "
        "otherwise. Every worker needs one for each batch: instead of leaving a batch out by what "
        "one worker alone sees of it, give its loss no weight, s.step(0 * loss), or decide by "
        "s.sum(...), which is the same on all"
    )


def agree_on_pause(
    lap_s: float, flag: StopFlag, group: Group, save: Callable[[], None] | None = None
) -> float:
    """Learn from the others how an evaluation has ended. Collective.

    Args:
        flag: Whether a signal has cut it short here.
        save: Saves what was trained, which a signal would lose; called by all workers or none.

    Returns:
        How long it took rank 0.

    Raises:
        InterruptedTraining: A signal has cut it short on a worker.
    """
    rows = group.gather_rows(torch.tensor([lap_s, flag.cut_short], dtype=torch.float64))
    if rows[:, 1].any():
        if save is not None:
            save()
        raise InterruptedTraining
    return float(rows[0, 0])


def steps_to_next(step_s: float, last: int) -> int:
    """Choose after how many steps to exchange again, so that it happens about once a second.

    Args:
        step_s: Mean time of the newest steps.
        last: What was chosen before. At most twice as much: the first steps may be faster than
            those that follow, whose batches nobody has read ahead.
    """
    if step_s <= 0:
        return 1
    return max(1, min(_MAX_STEPS, 2 * last, int(_EVERY_S / step_s)))
