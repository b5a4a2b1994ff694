"""Waiting for conditions, with a limit, and looking at processes."""

import time
from collections.abc import Callable

import psutil

_LIMIT_S = 60.0


def until(condition: Callable[[], bool], limit_s: float = _LIMIT_S) -> None:
    """Poll a condition.

    Raises:
        TimeoutError: It didn't come true.
    """
    end_s = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError("the condition didn't come true")
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether a process exists and is more than a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
