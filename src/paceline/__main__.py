"""`python -m paceline` is the `paceline` command; here its process begins and ends."""

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType

from paceline.errors import ExitCode


def run() -> None:
    """Be the `paceline` command in a process of its own; doesn't return."""
    takes_interrupts = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    if takes_interrupts:
        signal.signal(signal.SIGINT, _leave_at_once)
    # A tenth of a second of imports, in which Ctrl-C would leave a traceback.
    from paceline.cli.app import main, prints_its_result
    from paceline.launch.local.streams import open_closed_streams, tolerate_failing_output
    from paceline.launch.signals import CommandInterrupt

    open_closed_streams()
    needs_output = prints_its_result(sys.argv[1:])
    tolerate_failing_output(needs_reader=needs_output)
    interrupt = CommandInterrupt()
    if takes_interrupts:
        signal.signal(signal.SIGINT, interrupt)
    code = main()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command is over: a late one changes nothing
    if interrupt.received and code != ExitCode.DONE:
        code = ExitCode.RESUMABLE  # whatever a library made of the interruption
    code = _flushed(code, needs_output)
    if "torch" in sys.modules:
        _leave(code)
    sys.exit(code)


def _leave_at_once(_number: int, _frame: FrameType | None) -> None:
    """End the process on Ctrl-C: nothing has begun."""
    with suppress(OSError):
        os.write(2, b"paceline: interrupted\n")
    os._exit(ExitCode.RESUMABLE)


def _flushed(code: int, needs_output: bool) -> int:
    """Write what is still buffered: a result that can't be written is a failure.

    Args:
        needs_output: Whether what it prints is all that it is for.

    Returns:
        The exit code of the process.
    """
    from paceline.launch.local.streams import why_lost

    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has had enough; Python would complain at its own flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if not needs_output or (error := why_lost(sys.stdout)) is None:
        return code
    print(f"paceline: standard output can't be written: {error.strerror}", file=sys.stderr)
    return code or ExitCode.INFRASTRUCTURE


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
