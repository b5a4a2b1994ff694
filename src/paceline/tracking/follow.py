"""Feeds one tracker from a run's files until the training is over and all is delivered.

Beside the training, in a process of its own: an error here is noted in `logs/tracker.log`, tried
again, and costs the training nothing.
"""

import fcntl
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import final

from paceline.distributed.environment import read_environment
from paceline.errors import UsageError
from paceline.files import read_json_object, write_json
from paceline.options.fields import read_dataclass
from paceline.options.text import clause
from paceline.results.run_directory import RunDirectory
from paceline.tracking.base import Row, Sink
from paceline.tracking.registry import SinkEntry, trackers
from paceline.tracking.rows import Cursor, NewRows, describe, ending_of, summary_of

EVERY_S = 2.0
"""Between two looks at the files."""
_BATCH = 500
_FIRST_RETRY_S, _LONGEST_RETRY_S = 2.0, 60.0
_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET")
_MIN_SECRET_LENGTH = 6
"""Characters; what is shorter may be a word."""
_USER = re.compile(r"(?<=://)[^/@\s]+@")


@dataclass(frozen=True, kw_only=True)
class TrackerNote:
    """`tracker-NAME.json`: which of a tracker's runs this is, and how much of it is there."""

    id: str
    where: str
    cursor: Cursor
    kept_in: str = ""
    is_complete: bool = False
    """Whether everything up to the end of the training has been delivered."""

    @staticmethod
    def read(run: RunDirectory, name: str) -> "TrackerNote | None":
        """Read it; None where there is none, or it is damaged."""
        try:
            return read_dataclass(TrackerNote, read_json_object(run.tracker_json(name)))
        except (OSError, ValueError):
            return None

    def write(self, run: RunDirectory, name: str) -> None:
        """Write it, whole or not at all."""
        write_json(run.tracker_json(name), asdict(self))


@final
class Follower:
    """What is delivered of one run to one tracker."""

    def __init__(
        self,
        run: RunDirectory,
        name: str,
        project: str | None,
        say: Callable[[str], None],
        *,
        quiet: bool = False,
    ) -> None:
        """Create the follower.

        Args:
            run: The run directory.
            name: Of the tracker.
            project: As `--tracker-project` says it.
            say: Tells the user where the run can be seen, or why it can't be yet; called once.
            quiet: Don't tell where it can be seen.
        """
        self._run, self._name, self._project, self._quiet = run, name, project, quiet
        self._entry: SinkEntry = trackers()[name]
        self._say: Callable[[str], None] | None = say
        self._sink: Sink | None = None
        self._rows: NewRows | None = None
        self._pending: list[Row] = []
        self._note: TrackerNote | None = None
        self._retry_s, self._retry_at_s = _FIRST_RETRY_S, 0.0

    @property
    def has_connected(self) -> bool:
        """Whether the tracker has begun its run, or gone on with it, in this process."""
        return self._note is not None

    def deliver(self, *, is_over: bool, is_last: bool = False) -> bool:
        """Deliver what is new, and where the training is over the rest, too.

        Args:
            is_over: Found before the files are read, so that nothing comes after it.

        Returns:
            Whether everything is delivered that there will be.
        """
        if time.monotonic() < self._retry_at_s and not is_over:
            return False
        try:
            self._deliver(is_over=is_over)
        except Exception as error:  # noqa: BLE001  # whatever a tracker's package raises
            self._failed(error, is_last=is_last)
            return False
        self._retry_s = _FIRST_RETRY_S
        return is_over

    def _deliver(self, *, is_over: bool) -> None:
        sink = self._sink or self._connect()
        assert self._rows is not None
        # Rows in batches, each noted once it is delivered.
        self._pending += self._rows.read()
        while self._pending:
            batch = self._pending[:_BATCH]
            sink.log(batch)
            self._pending = self._pending[_BATCH:]
            self._advance(batch)
            self._pending += self._rows.read()
        if is_over:
            sink.finish(ending_of(self._run), summary_of(self._run))
            self._put(is_complete=True)
            self.close()

    def _connect(self) -> Sink:
        """Begin the tracker's run, or go on with it."""
        before = TrackerNote.read(self._run, self._name)
        info = describe(self._run, self._project)
        info = replace(info, kept_in=before.kept_in if before else "")
        self._sink = sink = self._entry.make()
        opened = sink.open(info, before.id if before else None)
        # Where the tracker had to begin another run, that has nothing yet.
        cursor = before.cursor if before and before.id == opened.id else Cursor()
        where = without_secrets(opened.where)  # it is copied elsewhere with --copy-to
        kept_in = opened.kept_in if without_secrets(opened.kept_in) == opened.kept_in else ""
        self._note = TrackerNote(id=opened.id, where=where, cursor=cursor, kept_in=kept_in)
        self._put()
        self._rows, self._pending = NewRows(self._run, cursor, opened.last_step), []
        if not self._quiet:
            self._print(opened.where)
        return sink

    def _advance(self, batch: list[Row]) -> None:
        assert self._note is not None
        cursor = self._note.cursor
        for row in batch:
            cursor = cursor.after(row)
        self._put(cursor)

    def _put(self, cursor: Cursor | None = None, *, is_complete: bool = False) -> None:
        assert self._note is not None
        self._note = replace(
            self._note, cursor=cursor or self._note.cursor, is_complete=is_complete
        )
        self._note.write(self._run, self._name)

    def _failed(self, error: Exception, *, is_last: bool) -> None:
        """Note an error, and when to try again."""
        log("".join(traceback.format_exception(error)), self._name)
        again = "" if is_last else ". It is tried again while the training runs"
        where = f"; more in {self._run.tracker_log}"
        first_line = str(error).strip().partition("\n")[0]
        self._print(f"{clause(first_line or error)}{again}{where}")
        self.close()
        self._retry_at_s = time.monotonic() + self._retry_s
        self._retry_s = min(_LONGEST_RETRY_S, 2 * self._retry_s)

    def _print(self, line: str) -> None:
        log(line, self._name)
        if self._say is not None:
            self._say(f"{self._name}: {without_secrets(line)}")
            self._say = None

    def close(self) -> None:
        """Close the connection to the tracker; called once at the end, in any case."""
        sink, self._sink = self._sink, None
        if sink is not None:
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001  # it is of no use any more
                log("".join(traceback.format_exception(error)), self._name)


def follow(follower: Follower, run: RunDirectory, is_over: Callable[[], bool]) -> bool:
    """Feed a tracker until the training is over. Blocks.

    After the end a tracker that has been reached before is tried until this process is ended, any
    other once.

    Returns:
        Whether everything is delivered.
    """
    while True:
        over = is_over()
        if run.run_json.exists():
            is_last = over and not follower.has_connected
            if follower.deliver(is_over=over, is_last=is_last):
                return True
            if over and not follower.has_connected:
                return False
        elif over:
            return True  # nothing was trained
        time.sleep(EVERY_S if not over else _FIRST_RETRY_S)


@contextmanager
def alone(run: RunDirectory, name: str) -> Iterator[None]:
    """Wait until no other process feeds the same tracker with this run, and keep others out.

    Raises:
        UsageError: The run directory can't be written.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(run.logs / f".tracker-{name}.lock", flags, 0o600)
    except OSError as error:
        raise UsageError(f"{run.logs} can't be written ({error.strerror})") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def log(text: str, name: str) -> None:
    """Put a line into the tracker's log, which standard error is."""
    moment = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError):
        print(f"{moment} {name}: {without_secrets(text)}", file=sys.stderr, flush=True)


def without_secrets(text: str) -> str:
    """Remove credentials: values of variables named as secrets, users in addresses."""
    for value in _secrets():
        text = text.replace(value, "***")
    return _USER.sub("***@", text)


def _secrets() -> list[str]:
    variables: Mapping[str, str] = read_environment()
    named = [value for name, value in variables.items() if _SECRET.search(name)]
    return sorted((v for v in named if len(v) >= _MIN_SECRET_LENGTH), key=len, reverse=True)
