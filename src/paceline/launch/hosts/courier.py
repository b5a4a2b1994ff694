"""Brings a run's small files from a host to the launcher, while it trains and at its end."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import final

from paceline.config.rundir import RunDirectory
from paceline.launch.boundary import failure_path
from paceline.launch.hosts import child
from paceline.launch.hosts.wire import Message

EVERY_S = 2.0
_LONGEST_BYTES = 4 * 1024 * 1024
"""Of a longer file the end is brought."""


@final
class Courier:
    """Sends files that have changed; snapshots stay where they are."""

    def __init__(self, run: RunDirectory, ranks: Sequence[int], *, leads: bool) -> None:
        """Prepare; `running` begins.

        Args:
            run: The host's run directory.
            ranks: The host's workers, whose logs are brought.
            leads: Whether rank 0 is among them, which writes what all have in common.
        """
        self._path = run.path
        common = [run.run_json, run.metrics_csv] if leads else []
        self._often = common
        logs = [run.rank_log(rank) for rank in ranks]
        logs += [failure_path(run.logs, rank) for rank in ranks]
        self._at_the_end = [*common, *([run.summary_json] if leads else []), *logs]
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
                self._send(path)

    def _send(self, path: Path) -> None:
        with suppress(OSError):
            status = path.stat()
            state = (status.st_mtime_ns, status.st_size)
            if self._sent.get(path) != state:
                with path.open("rb") as file:
                    file.seek(max(0, status.st_size - _LONGEST_BYTES))
                    text = file.read().decode(errors="replace")
                self._sent[path] = state
                child.tell({"file": str(path.relative_to(self._path)), "text": text})


def keep_file(run: RunDirectory, message: Message) -> None:
    """Write a file that a host has sent into the launcher's run directory, whole or not at all.

    Args:
        run: The launcher's.
        message: From `Courier`; a name that isn't one of a run's files is not written.
    """
    name, text = str(message["file"]), str(message["text"])
    known = {path.name for path in (run.run_json, run.metrics_csv, run.summary_json)}
    folder, _, last = name.rpartition("/")
    if folder not in ("", run.logs.name) or not last or (not folder and name not in known):
        return
    if folder and not last.startswith(("rank-", "failure-rank-")):
        return
    path = run.path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{last}.partial")
    partial.write_text(text)
    partial.replace(path)
