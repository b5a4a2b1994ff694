"""Standard streams that don't fail a process when they are closed, full, or without a reader.

Output that can't be written is dropped: a training is worth more than its log.
"""

import errno
import io
import os
import sys
from contextlib import suppress
from typing import TextIO, cast, final

_LOST = {errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EBADF, errno.EFBIG}


@final
class _Tolerant(io.FileIO):
    """Writes to a file descriptor; what can't be written is dropped without an error."""

    def __init__(self, descriptor: int, raised: frozenset[int], replaced: TextIO) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._replaced = replaced  # whoever made it may have it close the descriptor when it goes
        self._raised = raised
        self.lost: OSError | None = None
        """Why something was lost, the last time."""

    def write(self, content: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """Write, or lose, the content."""
        try:
            return super().write(content)
        except OSError as error:
            if error.errno in self._raised or error.errno not in _LOST:
                raise
            self.lost = error
            return len(content)


def open_closed_streams() -> None:
    """Put the null device where a standard stream is closed: a file would take its number else.

    Call it before anything is opened. Python has None for a stream that it found closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this
            os.set_inheritable(null, True)
    # Python's own streams are None where the descriptor was closed at its start.
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    _use(sys.stdout or os.fdopen(1, "w", closefd=False), "stdout")
    _use(sys.stderr or os.fdopen(2, "w", closefd=False), "stderr")


def _use(stream: TextIO, name: str) -> None:
    vars(sys).update({name: stream, f"__{name}__": stream})


def tolerate_failing_output(*, needs_reader: bool = False) -> None:
    """Let what is printed be lost where it can't be written, without an error, from now on.

    Args:
        needs_reader: Raise BrokenPipeError nevertheless where nobody reads standard output.
    """
    _use(tolerant(sys.stdout, 1, needs_reader=needs_reader), "stdout")
    _use(tolerant(sys.stderr, 2), "stderr")


def tolerant(stream: TextIO, descriptor: int, *, needs_reader: bool = False) -> TextIO:
    """Make a text stream of a descriptor that loses what the descriptor doesn't take.

    Args:
        stream: That has written there so far: its encoding and its buffering are taken over.
        descriptor: Stays open when the new stream is closed.
        needs_reader: Raise BrokenPipeError nevertheless.
    """
    with suppress(OSError):  # its buffer stays full; nobody writes to it any more
        stream.flush()
    by_line = stream is sys.stderr or getattr(stream, "line_buffering", True)
    raised = frozenset({errno.EPIPE} if needs_reader else ())
    return io.TextIOWrapper(
        io.BufferedWriter(cast(io.RawIOBase, _Tolerant(descriptor, raised, stream))),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=by_line,
        write_through=getattr(stream, "write_through", False),
    )


def why_lost(stream: TextIO) -> OSError | None:
    """Say why something printed to a tolerant stream was lost; None where nothing was."""
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    return raw.lost if isinstance(raw, _Tolerant) else None
