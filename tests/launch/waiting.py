"""Waiting for conditions, with a limit, and looking at processes."""

import os
import time
from collections.abc import Callable

import psutil

PATIENCE = float(os.environ.get("PACELINE_TEST_PATIENCE", "1"))
"""Every limit of a wait is multiplied by this: for machines that are slow, or busy for long."""
_LIMIT_S = 60.0


def patient(limit_s: float) -> float:
    """Give the limit of a wait on this machine, as it is now: longer where others compute too.

    A limit is for what never comes: no test may rely on how soon after it something fails.
    """
    return limit_s * PATIENCE * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def until(condition: Callable[[], bool], limit_s: float = _LIMIT_S) -> None:
    """Poll a condition.

    Raises:
        TimeoutError: It didn't come true.
    """
    start_s = time.monotonic()
    while not condition():
        if time.monotonic() - start_s > patient(limit_s):
            raise TimeoutError("the condition didn't come true")
        time.sleep(0.005)


def alive(pid: int) -> bool:
    """Whether a process exists and is more than a zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
