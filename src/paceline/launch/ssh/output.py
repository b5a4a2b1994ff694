"""What hosts print, on the launcher's terminal."""

import sys
from collections.abc import Callable
from contextlib import suppress


def show_line(width: int) -> Callable[[str, str, bool], None]:
    """Make what shows hosts' lines: each with its host's name before it.

    Args:
        width: Of the longest name.
    """

    def show(name: str, text: str, is_error: bool) -> None:
        stream = sys.stderr if is_error else sys.stdout
        with suppress(OSError):  # the terminal has gone, `| head` has left: training goes on
            print(f"{name:{width}} | {text}", file=stream, flush=True)

    return show


def quietly(say: Callable[[str], None]) -> Callable[[str], None]:
    """Make a way to tell the user that goes on where nobody listens any more."""

    def tell(line: str) -> None:
        with suppress(OSError):
            say(line)

    return tell
