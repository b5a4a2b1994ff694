"""Ctrl-C, SIGTERM and SIGHUP while a command waits for a job elsewhere: heeded where it waits.

Nothing is raised by the handlers themselves: an exception in the middle of a library is lost, or
leaves it broken.
"""

import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

from paceline.launch.signals import SAME_S, stops_handled

_POLL_S = 0.05


class StopRequestedError(BaseException):
    """The user wants the job to stop. Not an Exception: nothing on the way may swallow it."""


@final
class StopRequests:
    """The signals of one command; the main thread's alone."""

    def __init__(self, reader: int) -> None:
        """Args:
        reader: Descriptor at which a byte comes with each signal, without a wait on reading.
        """
        self._reader = reader
        self._last_s = -SAME_S
        self._is_wanted = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal; what waits has been woken by its byte."""
        now_s = time.monotonic()
        if now_s - self._last_s >= SAME_S:
            self._is_wanted = True
        self._last_s = now_s

    def again(self) -> None:
        """Note that the stop is under way: from now on the next signal counts."""
        self._is_wanted = False

    def check(self) -> None:
        """Raise StopRequestedError if a signal came."""
        if self._is_wanted:
            raise StopRequestedError

    def sleep(self, seconds: float) -> None:
        """Wait for so long, or raise StopRequestedError as soon as a signal comes."""
        until_s = time.monotonic() + seconds
        self.check()
        while (left_s := until_s - time.monotonic()) > 0:
            self._wait([], left_s)

    def wait_for_output(self, descriptor: int) -> None:
        """Wait until a pipe has something, or its end; raises StopRequestedError for a signal."""
        self.check()
        while descriptor not in self._wait([descriptor], None):
            pass

    def _wait(self, awaited: list[int], limit_s: float | None) -> list[int]:
        """Wait for one of the descriptors or a signal, and give those that can be read."""
        ready, _, _ = select.select([*awaited, self._reader], [], [], limit_s)
        if self._reader in ready:
            os.read(self._reader, 4096)
        self.check()
        return ready

    def run(self, words: list[str], limit_s: float) -> int | None:
        """Run a command to its end, in a session of its own.

        Returns:
            Its exit code; None if it took too long, and was killed.
        """
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
        deadline_s = time.monotonic() + limit_s
        try:
            while process.poll() is None:
                if time.monotonic() > deadline_s:
                    return None
                self.sleep(_POLL_S)
        finally:
            process.kill()
            process.wait()
        return process.returncode


@contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """Heed the signals in the block; those that are ignored (by nohup) stay ignored."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    requests = StopRequests(reader)
    # A handler in Python doesn't run while a wait begins, and would be too late to end it.
    woken = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        with stops_handled(requests.receive):
            yield requests
    finally:
        signal.set_wakeup_fd(woken)
        os.close(reader)
        os.close(writer)
