"""Ctrl-C and SIGTERM become a flag; the workers then agree on the step after which all stop."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType
from typing import final

from paceline.data.batch import Batch

_PATIENCE_S = 1.5
"""Launchers kill a few seconds after the signal; ours after 3.5."""
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

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Forked loader processes inherit the handler and must not act on it."""
        if os.getpid() != self._process:
            return
        if self.name is not None and number == signal.SIGINT and not self._under_launcher:
            raise KeyboardInterrupt
        if self.name is None:
            self._since_s = monotonic()
        self.name = signal.Signals(number).name

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
    handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, flag.receive) for number in handled}
    try:
        yield flag
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
