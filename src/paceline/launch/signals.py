"""Signals while workers, or a job, run: the first asks to stop, the second to end at once."""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Protocol, final

from paceline.errors import ExitCode
from paceline.launch.restart_policy import StopGrace

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Handler = Callable[[int, FrameType | None], None]

SAME_S = 0.5
"""Signals this close together are one: a wrapper often passes on what the group got already."""


@contextmanager
def stops_handled(
    handler: Handler, numbers: Sequence[signal.Signals] = STOP_SIGNALS
) -> Iterator[Sequence[signal.Signals]]:
    """Handle the signals that ask to stop in the block; those that are ignored (nohup) stay so.

    Gives those that the handler receives. For the main thread alone.
    """
    before = {number: signal.getsignal(number) for number in numbers}
    handled = [number for number, usual in before.items() if usual is not signal.SIG_IGN]
    try:
        for number in handled:
            signal.signal(number, handler)
        yield handled
    finally:
        for number in handled:
            signal.signal(number, before[number])


@final
class CommandInterrupt:
    """Handles Ctrl-C of a command: the first raises KeyboardInterrupt, a second ends the process.

    What is raised within an import may be lost: torch's C code takes a failed `import numpy` for
    one that isn't installed. `received` stays, so that no workers are started after that.
    """

    def __init__(self) -> None:
        self.received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handle it."""
        if self.received:  # the first is taking its time
            os._exit(ExitCode.RESUMABLE)
        self.received = True
        raise KeyboardInterrupt


def was_interrupted() -> bool:
    """Tell whether Ctrl-C came before, which may have been lost on its way."""
    usual = signal.getsignal(signal.SIGINT)
    return isinstance(usual, CommandInterrupt) and usual.received


@contextmanager
def signals_raised() -> Iterator[None]:
    """Have each signal that asks to stop raise KeyboardInterrupt in the block."""
    if was_interrupted():
        raise KeyboardInterrupt
    with stops_handled(_interrupt):
        yield


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@final
class StopRequests:
    """Counts how often a command that waits for a job elsewhere was asked to stop.

    Nothing is raised by the handler itself: an exception in the middle of a library is lost, or
    leaves it broken.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last_s = float("-inf")

    def note(self, number: int, frame: FrameType | None) -> None:
        """Count a signal; those close together are one."""
        now_s = time.monotonic()
        if now_s - self._last_s >= SAME_S:
            self.count += 1
        self._last_s = now_s


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Count signals while the block runs; none ends the process."""
    requests = StopRequests()
    with stops_handled(requests.note):
        yield requests


class Stoppable(Protocol):
    """What signals are passed on to. A signal handler calls it: it takes no lock."""

    def request_stop(self, since_s: float, grace: StopGrace) -> None:
        """Ask to stop.

        Args:
            since_s: When the user asked, by `time.monotonic`.
            grace: How long those that were asked may take.
        """

    def kill(self) -> None:
        """Kill all workers at once."""


class InterruptedStartError(BaseException):
    """A signal came while workers were being started, so there is nothing to wait for."""


@final
class Interrupts:
    """Receives the signals of one launch; the main thread's alone."""

    def __init__(
        self, grace: StopGrace | None = None, print_line: Callable[[str], None] = lambda line: None
    ) -> None:
        """Prepare.

        Args:
            grace: How long those that a signal is passed on to may take to stop.
            print_line: Tells the user what is waited for then; any thread may call it.
        """
        self._grace = grace or StopGrace()
        self.print_line = print_line
        self._first_s: float | None = None
        self._workers: Stoppable | None = None
        self._starting = False
        self._abandoned = False
        self._caught: Sequence[signal.Signals] = ()

    @property
    def received(self) -> bool:
        """Whether the user asked to stop."""
        return self._first_s is not None

    @property
    def abandoned(self) -> bool:
        """Whether the launch was given up from outside: its workers' end says nothing."""
        return self._abandoned

    def abandon(self) -> None:
        """Give the launch up: its workers are killed. Another thread may call it."""
        self._abandoned = True
        if self._workers is not None:
            self._workers.kill()

    @contextmanager
    def caught(self) -> Iterator["Interrupts"]:
        """Handle the signals in the block. One that is ignored (nohup) stays ignored."""
        if was_interrupted():
            self.note_received()
        with stops_handled(self._handle) as self._caught:
            yield self

    def install(self) -> None:
        """Set the handlers (again: starting processes, the elastic agent sets its own)."""
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle if number in self._caught else signal.SIG_IGN)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """Let a signal break off the block, by InterruptedStartError, until workers are guarded."""
        self._starting = True
        try:
            if self.received:
                raise InterruptedStartError
            yield
        except Exception as error:
            if not (self.received and self._starting):
                raise
            # An import that a signal breaks off may end with an error of its library's own.
            raise InterruptedStartError from error
        finally:
            self._starting = False
            self._workers = None

    def pass_on(self, workers: Stoppable) -> None:
        """Have signals go to the workers from now on."""
        # The workers are set before the check: a signal in between reaches them either way.
        self._workers = workers
        self._starting = False
        if self._first_s is not None:
            workers.request_stop(self._first_s, self._grace)
        if self._abandoned:
            workers.kill()

    def note_received(self) -> None:
        """Note a signal that another handler received."""
        if self._first_s is None:
            self._first_s = time.monotonic()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        # First signal: stop the workers, or break off their start; before that it is only noted,
        # and `starting` raises.
        if self._first_s is None:
            self._first_s = now_s
            if self._workers is not None:
                self._workers.request_stop(now_s, self._grace)
            elif self._starting:
                raise InterruptedStartError
        # Second signal, unless it is the first one's echo: kill.
        elif self._workers is not None and now_s - self._first_s > SAME_S:
            self._workers.kill()
