"""Starts the process that copies a run elsewhere, and waits for it when the training is over."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import final

from paceline.checkpoint.options import SnapshotOptions
from paceline.checkpoint.remote.process import (
    FINISH,
    RELEASE,
    CopySpec,
    command,
    note_in_summary,
)
from paceline.checkpoint.remote.record import CopyRecord
from paceline.errors import InfrastructureError, UsageError
from paceline.options.shell import command_line
from paceline.options.text import fitting, print_stderr, printable
from paceline.results.run_directory import RunDirectory
from paceline.runtime.spec import Launch
from paceline.runtime.write_report import CutShortError, cut_short_by_signals

FIRST_CONTACT_S = 30.0
"""For the store to answer before a training begins."""
_RELEASE_S = 5.0
_END_S = 2.0
_SAY_AFTER_S = 1.0
_PIECE_BYTES = 4096


def copied_by(launch: Launch) -> AbstractContextManager[None]:
    """Copy a launch's run directory in the block; see `copied`."""
    options = launch.config.snapshots
    return copied(launch.run, options, is_new=launch.makes, quiet=launch.quiet)


def owner(owned: ExitStack) -> Callable[[Launch], None]:
    """Give what makes a launch's run directory this process's, until `owned` is closed.

    It is locked, and copied elsewhere where that is asked for.
    """

    def own(launch: Launch) -> None:
        owned.enter_context(launch.run.lock())
        owned.enter_context(copied_by(launch))

    return own


@contextmanager
def copied(
    run: RunDirectory, options: SnapshotOptions, *, is_new: bool, quiet: bool = False
) -> Iterator[None]:
    """Copy a run directory elsewhere while the block runs, and wait at its end for the last copies.

    Called by the one process that owns the run directory. Does nothing without `--copy-to`.

    Args:
        options: Where the copies go, and for how long the end waits.
        is_new: Whether the training begins with this start. Then a store that can't be used is an
            error; one that goes on is never stopped by it.
        quiet: Say nothing where everything was copied.

    Raises:
        UsageError: The place is another training's; or, of a new one, it can't be used.
        InfrastructureError: The training is new, and the store doesn't answer.
    """
    url = options.copy_url
    if url is None:
        yield
        return
    before, record = CopyRecord.read(run), CopyRecord.for_run(run, url)
    # The token is on disk before the place gets it, so that a crash in between locks nobody out.
    record.write(run)
    process = _Process(
        CopySpec(run_dir=str(run.path), record=record, keep_last=options.keep_last, is_new=is_new)
    )
    try:
        process.wait_until_ready(is_new=is_new)
    except BaseException:
        process.end()
        run.copy_json.unlink(missing_ok=True)
        if before is not None:
            before.write(run)
        if not run.run_json.exists():
            run.discard()
        raise
    try:
        yield
    finally:
        if _finish(run, process, record.url, options.copy_wait_s) and not quiet:
            again = command_line("resume", record.url)
            line = printable(f"Copied to {record.url}. Resume from there: {again}")
            print(fitting(line, sys.stdout), flush=True)


def _finish(run: RunDirectory, process: "_Process", url: str, limit_s: float) -> bool:
    """Wait for what is left to be copied, and say what isn't. Returns whether everything is."""
    if not run.run_json.exists():  # nothing was trained
        process.order(RELEASE)
        process.wait((), _RELEASE_S)
        process.end()
        return False
    # Wait, and say so where it takes long; a signal ends the wait, not the copy made so far.
    cut_short, reply = False, None
    process.order(FINISH)
    try:
        with cut_short_by_signals():
            reply = process.wait(("finished",), min(limit_s, _SAY_AFTER_S))
            if reply is None and limit_s > _SAY_AFTER_S:
                print_stderr(
                    f"Copying what is left to {url}, for at most {limit_s:g} s (Ctrl-C ends it)"
                )
                reply = process.wait(("finished",), limit_s - _SAY_AFTER_S)
    except CutShortError:
        cut_short = True
    process.end()
    record = CopyRecord(url=url)
    with suppress(UsageError):  # whatever became of it, the training's end stands
        record = CopyRecord.read(run) or record
    if reply is not None:
        return True
    # Not everything is there: note in the summary, and print, what is, and what to do.
    note_in_summary(run, replace(record, complete=False))
    why = "you ended the wait" if cut_short else f"within {limit_s:g} s"
    if record.last_failure is not None:
        why = f"the last failure: {record.last_failure}"
    newest = f"step {record.newest_step}" if record.newest_step >= 0 else "none"
    print_stderr(
        f"paceline: not everything is copied to {url} ({why}). The newest whole snapshot there: "
        f"{newest}; here: step {run.newest_step()}. {run.path} has all of it"
    )
    return False


def _message(line: bytes) -> tuple[str, str]:
    """Read a message; a line that a store's library has printed is of no kind."""
    try:
        message = json.loads(line)
        return str(message["kind"]), str(message["text"])
    except (ValueError, TypeError, KeyError):
        return "", ""


@final
class _Process:
    """The copying process, seen from the training's."""

    def __init__(self, spec: CopySpec) -> None:
        """Start it, in a session of its own: the terminal's Ctrl-C is the training's."""
        self._pending = b""
        self._process = subprocess.Popen(
            [*command(), spec.to_json()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def wait_until_ready(self, *, is_new: bool) -> None:
        """Wait until the store has answered; a training that goes on doesn't need that.

        Raises:
            UsageError, InfrastructureError: As `copied`.
        """
        reply = self.wait(("ready", "refused", "failed"), FIRST_CONTACT_S)
        if reply is not None and reply[0] == "refused":
            raise UsageError(f"--copy-to: {reply[1]}")
        if reply is None and is_new:
            code = self._process.poll()
            why = f"the store hasn't answered for {FIRST_CONTACT_S:g} s"
            if code is not None:
                why = f"the process that copies has ended by itself (exit code {code})"
            raise InfrastructureError(f"--copy-to: {why}; nothing was started")

    def order(self, order: str) -> None:
        """Send it an order; errors are ignored where it has ended."""
        assert self._process.stdin is not None
        with suppress(OSError):
            os.write(self._process.stdin.fileno(), f"{order}\n".encode())

    def wait(self, kinds: Sequence[str], limit_s: float) -> tuple[str, str] | None:
        """Wait for a message, or its end, at most so long.

        Returns:
            The message's kind and text; None where none came.
        """
        assert self._process.stdout is not None
        descriptor, deadline_s = self._process.stdout.fileno(), time.monotonic() + limit_s
        while True:
            # Whole lines that are there already; else read on, until the deadline or the end.
            *lines, self._pending = self._pending.split(b"\n")
            for kind, text in map(_message, lines):
                if kind in kinds:
                    return kind, text
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([descriptor], [], [], left_s)[0]:
                return None
            piece = os.read(descriptor, _PIECE_BYTES)
            if not piece:
                return None
            self._pending += piece

    def end(self) -> None:
        """End it, whatever it is doing."""
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
