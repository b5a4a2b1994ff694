"""Brings a run's small files from a host to the launcher, while it trains and at its end."""

import codecs
import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from paceline.files import open_within, write_atomic
from paceline.launch.errors.error_records import failure_path
from paceline.launch.ssh import agent_io
from paceline.launch.ssh.protocol import Message
from paceline.results.run_directory import RunDirectory

EVERY_S = 2.0
_LONGEST_LOG_BYTES = 4 * 1024 * 1024
"""Of a longer log the end is brought."""
_OFTEN_BYTES = 4 * 1024 * 1024
"""A larger file comes at the end alone: each time it is sent whole."""
_PIECE_BYTES = 64 * 1024
"""Between two pieces other messages can be sent."""
_IN_LOGS = re.compile(r"rank-[0-9]+\.log|failure-rank-[0-9]+\.json")


@final
class ArtifactTransfer:
    """Sends files that have changed; snapshots stay where they are."""

    def __init__(self, run: RunDirectory, ranks: Sequence[int], *, leads: bool) -> None:
        """Prepare; `running` begins.

        Args:
            ranks: The host's workers, whose logs are brought.
            leads: Whether rank 0 is among them, which writes what all have in common.
        """
        self._path = run.path
        written = [run.run_json, run.metrics_csv, run.steps_csv, run.profile_json]
        common = written if leads else []
        self._often = common
        self._logs = [run.rank_log(rank) for rank in ranks]
        failures = [failure_path(run.logs, rank) for rank in ranks]
        self._at_the_end = [*common, *([run.summary_json] if leads else []), *self._logs, *failures]
        self._sent: dict[Path, tuple[int, int]] = {}
        self._over = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Bring files while the block runs, and the rest after it."""
        thread = threading.Thread(target=self._repeat, name="paceline-courier", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            for path in self._at_the_end:
                self._send(path)

    def _repeat(self) -> None:
        while not self._over.wait(EVERY_S):
            for path in self._often:
                if is_small(path):
                    self._send(path)

    def _send(self, path: Path) -> None:
        with suppress(OSError):
            # The state is taken before the content: a change in between is sent the next time.
            status = path.stat()
            state = (status.st_mtime_ns, status.st_size)
            if self._sent.get(path) != state:
                content = end_of_log(path) if path in self._logs else path.read_bytes()
                for message in pieces(str(path.relative_to(self._path)), content):
                    agent_io.send(message)
                self._sent[path] = state


def is_small(path: Path) -> bool:
    """Tell whether a file is there, and may be sent whole each time that it has changed."""
    try:
        return path.stat().st_size <= _OFTEN_BYTES
    except OSError:
        return False


def end_of_log(path: Path, longest_bytes: int = _LONGEST_LOG_BYTES) -> bytes:
    """Read the last lines of a log that is too long, and all of any other."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - longest_bytes))
        content = file.read()
    return content if size <= longest_bytes else content.partition(b"\n")[2] or content


def pieces(name: str, content: bytes) -> Iterator[Message]:
    """Cut a file into messages for `keep_file`.

    Args:
        name: Its path in the run directory.
        content: What is in it; what isn't UTF-8 is replaced.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    at = 0
    for start in range(0, max(1, len(content)), _PIECE_BYTES):
        end = start + _PIECE_BYTES
        text = decoder.decode(content[start:end], final=end >= len(content))
        yield {"file": name, "at": at, "text": text, "last": end >= len(content)}
        # Counted as it is written: a replaced byte takes three.
        at += len(text.encode())


def keep_file(run: RunDirectory, message: Message) -> str:
    """Take a piece of a file that a host sends; with the last one the file is there, whole.

    Args:
        run: The launcher's, in whose directory it is written.
        message: Of `pieces`; a name that isn't one of a run's files is not written.

    Returns:
        Why it can't be written, for the user; empty where all is well. A training goes on without.
    """
    path = _place(run, str(message.get("file")))
    if path is None:
        return ""
    try:
        _keep(path, int(str(message["at"])), str(message["text"]), is_last=bool(message["last"]))
    except (KeyError, OSError, ValueError) as error:
        return f"{path} can't be written: {error}"
    return ""


def _place(run: RunDirectory, name: str) -> Path | None:
    ours = (run.run_json, run.metrics_csv, run.steps_csv, run.profile_json, run.summary_json)
    top = {path.name: path for path in ours}
    folder, _, last = name.rpartition("/")
    if folder == run.logs.name and _IN_LOGS.fullmatch(last):
        return run.logs / last
    return top.get(name)


def _keep(path: Path, at: int, text: str, *, is_last: bool) -> None:
    content = text.encode(errors="replace")
    partial = path.with_name(f".{path.name}.partial")
    # The first piece begins a new file; what an earlier transfer left half done goes.
    if at == 0:
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        partial.unlink(missing_ok=True)
    # One piece is the whole: no detour by a partial file.
    if is_last and at == 0:
        write_atomic(path, content)
        return
    try:
        _append(partial, at, content)
        if is_last:
            write_atomic(path, partial.read_bytes())
    except OSError:
        partial.unlink(missing_ok=True)  # a full disk: it is needed for better things
        raise
    if is_last:
        partial.unlink()


def _append(partial: Path, at: int, content: bytes) -> None:
    """Add a piece to the earlier ones; whatever else has that name is left alone."""
    how = os.O_CREAT | os.O_EXCL if at == 0 else os.O_APPEND
    descriptor = open_within(str(partial), os.O_WRONLY | os.O_NOFOLLOW | how)
    with os.fdopen(descriptor, "ab" if at else "wb") as file:
        # The offset must match, so that a lost piece is noticed.
        if os.fstat(descriptor).st_size != at:
            raise OSError("a piece of it is missing")
        file.write(content)
