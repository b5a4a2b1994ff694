"""Where a worker's output goes: rank 0 to the terminal and its log, the others to their logs."""

import faulthandler
import io
import os
import re
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO, cast, final

from paceline.files import open_within, storing
from paceline.launch.local.streams import tolerant
from paceline.results.run_directory import log_path

_CONTROL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[@-Z\\-_]|\x07")
_HEADER = "---- attempt "
_CRASH = re.compile(r"^(?:terminate called|Fatal Python error)", re.MULTILINE)
"""Where C++ code says which exception nobody caught, or Python's fault handler begins."""
_TAIL_BYTES = 65536


def open_log(log_dir: Path, rank: int, world_size: int, attempt: int) -> TextIO:
    """Open a worker's log for appending, with a line that says which attempt begins.

    Raises:
        StorageError: It can't be written. A full disk is none: the log stays as it is.
    """
    with storing(log_dir):
        log_dir.mkdir(0o700, parents=True, exist_ok=True)
        log = open(  # noqa: SIM115  # the caller closes it
            log_path(log_dir, rank), "a", 1, "utf-8", errors="replace", opener=open_within
        )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    with suppress(OSError):
        log.write(
            f"{_HEADER}{attempt}, rank {rank} of {world_size}, process {os.getpid()} "
            f"on {socket.gethostname()}, {now} ----\n"
        )
    return log


@contextmanager
def faults_watched(log: TextIO) -> Iterator[None]:
    """Write all threads' stacks to the log on a crash, and whenever SIGUSR1 arrives."""
    before = faulthandler.is_enabled()
    faulthandler.enable(file=log, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=log, all_threads=True)
    try:
        yield
    # faulthandler keeps the descriptor's number: it must let go before the log is closed.
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.disable()
        if before and sys.__stderr__ is not None:
            faulthandler.enable(file=sys.__stderr__)


def redirect(log: TextIO) -> None:
    """Send everything this process prints to its log, what C code prints as well."""
    _buffer_by_line()
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)


def redirect_noise(log: TextIO) -> None:
    """Send what C code writes to standard error to the log; Python's stays on the terminal.

    Gloo and NCCL report a lost peer there, at length; the launcher tells the user in one line.
    """
    _buffer_by_line()
    # Descriptor 2, which C code writes to, becomes the log; Python writes to the copy.
    terminal = os.dup(2)
    os.dup2(log.fileno(), 2)
    sys.stderr = tolerant(sys.stderr, terminal)


def _buffer_by_line() -> None:
    """Write whole lines at once, so that none is lost when the process is killed."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)


@contextmanager
def teed(log: TextIO) -> Iterator[None]:
    """Copy what Python code prints to the log as well, while the block runs."""
    before = sys.stdout, sys.stderr
    pair = Tee(before[0], log), Tee(before[1], log)
    sys.stdout, sys.stderr = (cast(TextIO, tee) for tee in pair)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for tee in pair:
            tee.flush()
            tee.finish()


def write_error(log: TextIO, error: BaseException) -> None:
    """Write an exception's whole traceback to the log alone; the launcher prints the failure."""
    with suppress(OSError):
        traceback.print_exception(error, file=log)
        log.flush()


def read_crash(path: Path) -> str:
    """Read what a process wrote to its log as it died, in its last attempt; else nothing."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    # A crash of an earlier attempt stands in the same file, before the last header.
    last = text[text.rfind(_HEADER) :] if _HEADER in text else text
    match = _CRASH.search(last)
    return last[match.start() :] if match else ""


@final
class Tee(io.TextIOBase):
    """A terminal stream; its finished lines go to a log too, without colours and redrawings."""

    def __init__(self, terminal: TextIO, log: TextIO) -> None:
        self._terminal = terminal
        self._log = log
        self._line = ""

    def write(self, text: str) -> int:
        """Write to the terminal; whole lines go to the log."""
        # The log gets finished lines only: what is redrawn in place counts once, as it was last.
        self._show(text)
        *lines, self._line = (self._line + text).split("\n")
        if lines:
            self._copy("".join(plain_line(line) + "\n" for line in lines))
        elif "\r" in text:  # a line that is redrawn in place must not grow
            self._line = self._line[self._line.rfind("\r") :]
        return len(text)

    def flush(self) -> None:
        """Flush the terminal (the log is written line by line)."""
        with suppress(OSError):
            self._terminal.flush()

    def finish(self) -> None:
        """Copy the last unfinished line."""
        if last := plain_line(self._line):
            self._copy(last + "\n")
        self._line = ""

    def isatty(self) -> bool:
        """Whether the terminal side is one, so that programs draw as they would without the log."""
        return self._terminal.isatty()

    def fileno(self) -> int:
        """Give the terminal's descriptor."""
        return self._terminal.fileno()

    def writable(self) -> bool:
        """Say yes."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a property serves as the attribute
        """The terminal's encoding."""
        return self._terminal.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """The terminal's way with characters it can't show."""
        return self._terminal.errors

    @property
    def buffer(self) -> io.BufferedIOBase:
        """The terminal's bytes, which bypass the log."""
        return cast(io.BufferedIOBase, self._terminal.buffer)

    def _show(self, text: str) -> None:
        with suppress(
            OSError
        ):  # its reader has left (`| head`) or its disk is full; the log goes on
            self._terminal.write(text)

    def _copy(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a full disk must not end a training
            self._log.write(text)


def plain_line(line: str) -> str:
    """Reduce a line to what stays visible: without control sequences, after its last redrawing."""
    visible = _CONTROL.sub("", line).rstrip("\r")
    return visible[visible.rfind("\r") + 1 :]
