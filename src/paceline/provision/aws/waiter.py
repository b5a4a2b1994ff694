"""Waiting for AWS: until it says what is wanted, a deadline passes, or the user has had enough.

Not by boto3's waiters: they sleep half a minute in one piece, so that a signal, which must begin to
delete what was made, would wait; and they give up with a state instead of AWS's first reason.
"""

import time
from collections.abc import Callable
from typing import TypeVar, final

_SLICE_S = 0.1
T = TypeVar("T")


@final
class Waiter:
    """Asks again and again."""

    def __init__(self, interrupted: Callable[[], bool], every_s: float = 5.0) -> None:
        self._interrupted = interrupted
        self._every_s = every_s

    def until(self, poll: Callable[[], T | None], timeout_s: float) -> T | None:
        """Poll until there is a result; blocks.

        Args:
            poll: Gives None for "not yet".
            timeout_s: After that it is asked once more and no longer.

        Returns:
            The answer, or None at the end of the time.

        Raises:
            KeyboardInterrupt: A signal asked to stop.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.check()
            late = time.monotonic() >= deadline_s
            answer = poll()
            if answer is not None or late:
                return answer
            self._pause(min(self._every_s, max(0.0, deadline_s - time.monotonic())))

    def check(self) -> None:
        """Stop where a signal asked for it.

        Raises:
            KeyboardInterrupt: One did.
        """
        if self._interrupted():
            raise KeyboardInterrupt

    def _pause(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while (left_s := end_s - time.monotonic()) > 0:
            self.check()
            time.sleep(min(_SLICE_S, left_s))


def never() -> bool:
    """Stand for "not interrupted" where nothing may interrupt."""
    return False
