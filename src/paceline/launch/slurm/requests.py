"""Signals to a command that waits for a Slurm job: how often it was asked to stop."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import final

from paceline.launch.signals import SAME_S

# Not SIGHUP: the job outlives the terminal that it was submitted from.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@final
class Requests:
    """Counts the requests to stop; signals close together are one."""

    def __init__(self) -> None:
        self.count = 0
        self._last_s = float("-inf")

    def note(self, number: int, frame: FrameType | None) -> None:
        """Count a signal."""
        now_s = time.monotonic()
        if now_s - self._last_s > SAME_S:
            self.count += 1
        self._last_s = now_s


@contextmanager
def requests_noted() -> Iterator[Requests]:
    """Count signals in the block instead of ending by them. An ignored one stays ignored."""
    requests = Requests()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, requests.note)
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
