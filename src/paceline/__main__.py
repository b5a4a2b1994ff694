"""`python -m paceline` is the `paceline` command; here its process begins and ends."""

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

from paceline.cli.app import main
from paceline.errors import ExitCode


def run() -> None:
    """Be the `paceline` command in a process of its own; doesn't return."""
    interrupted: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        if interrupted:  # the first is taking its time
            os._exit(ExitCode.RESUMABLE)
        interrupted.append(number)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command is over: a late one changes nothing
    if interrupted and code != ExitCode.DONE:
        code = ExitCode.RESUMABLE  # whatever a library made of the interruption
    if "torch" in sys.modules:
        _leave(code)
    sys.exit(code)


def _leave(code: int) -> None:
    """End as the interpreter does, but without taking itself apart.

    Threads of torch's C++ libraries may still run then; one that asks for the interpreter while it
    is being taken apart is killed with `terminate called without an active exception` (SIGABRT).
    """
    with suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, has no public name
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # its reader has left, or it is closed
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
