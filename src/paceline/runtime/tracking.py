"""Starts the processes that feed trackers, and waits for them when the training is over."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from paceline.metrics.options import MetricsOptions
from paceline.options.text import print_stderr
from paceline.results.run_directory import RunDirectory
from paceline.runtime.write_report import CutShortError, cut_short_by_signals

LIMIT_S = 30.0
"""From the end of a training until what isn't delivered is given up."""
CONNECT_S = 15.0
"""For the first connection, from the start of a tracker's process: a training may be shorter."""
_UNREACHED_S = 4.0
"""From the end of a training, for a tracker that hasn't been reached all the while."""
_SAY_AFTER_S = 1.0
_EVERY_S = 0.05
_SPARE_S = 2.0
"""The processes end themselves at the limit; this is for those that don't."""


@final
@dataclass(frozen=True, kw_only=True)
class _Feeder:
    """A process that feeds a tracker, and what tells whether it has reached it."""

    process: "subprocess.Popen[bytes]"
    note: Path
    """Written anew as soon as the tracker has begun its run, or gone on with it."""
    before: object
    """What the note was when the process was started."""
    started_s: float

    @property
    def is_running(self) -> bool:
        """Whether the process hasn't ended."""
        return self.process.poll() is None

    @property
    def has_connected(self) -> bool:
        """Whether it has reached its tracker: it writes its note only then."""
        return _stamp(self.note) != self.before

    def limit_s(self, ended_s: float) -> float:
        """Say how long after the end of the training it is waited for."""
        if self.has_connected:
            return LIMIT_S + _SPARE_S
        return max(_UNREACHED_S, self.started_s + CONNECT_S - ended_s)


Feeders = Mapping[str, _Feeder]
"""By the name of the tracker."""


@contextmanager
def tracked(run: RunDirectory, options: MetricsOptions, *, quiet: bool = False) -> Iterator[None]:
    """Have the run shown at trackers while the block runs, and wait at its end for what is left.

    Called by the one process that owns the run directory. Does nothing without `--tracker`.

    Args:
        run: The run directory; made, and locked. A summary of an earlier start is removed.
        options: Which trackers; `require_trackers` has passed them.
    """
    feeders: dict[str, _Feeder] = {}
    try:
        if options.tracker:
            run.remove_summary()  # to them it is the end
        for name in dict.fromkeys(options.tracker):
            try:
                feeders[name] = _start(run, name, options, *(["quiet"] if quiet else []))
            except OSError as error:  # no memory, too many processes: the training goes on
                print_stderr(f"paceline: --tracker {name} can't be fed: {error.strerror}")
        yield
    finally:
        if feeders:
            _finish(run, feeders, quiet=quiet)


def _start(run: RunDirectory, name: str, options: MetricsOptions, *more: str) -> _Feeder:
    """Start a process in a session of its own: the terminal's Ctrl-C is the training's."""
    arguments = (str(run.path), name, options.tracker_project or "", str(LIMIT_S), *more)
    note = run.tracker_json(name)
    before = _stamp(note)
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "paceline.tracking", *arguments],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    return _Feeder(process=process, note=note, before=before, started_s=time.monotonic())


def _stamp(note: Path) -> object:
    """Tell one state of a file from the next: each is another file, renamed to its name."""
    try:
        found = note.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


def _finish(run: RunDirectory, feeders: Feeders, *, quiet: bool) -> None:
    """Wait for the processes, and say what isn't delivered."""
    for feeder in feeders.values():
        assert feeder.process.stdin is not None
        feeder.process.stdin.close()  # by which they see the end
    trained, ended_s = run.run_json.exists(), time.monotonic()
    try:
        with cut_short_by_signals():
            running = _wait(feeders, ended_s, _SAY_AFTER_S)
            if running and trained and not quiet:
                most_s = max(feeders[name].limit_s(ended_s) for name in running)
                print_stderr(
                    f"Sending the rest to {' and '.join(running)}, for at most "
                    f"{min(most_s, LIMIT_S):.0f} s (Ctrl-C ends it)"
                )
            _wait(feeders, ended_s)
    except CutShortError:
        pass
    _end(feeders)
    late = [name for name, feeder in feeders.items() if feeder.process.returncode != 0]
    some = [name for name in late if feeders[name].has_connected]
    none = [name for name in late if name not in some]
    if trained:
        _print_missing(run, some, "didn't get everything")
        _print_missing(run, none, "couldn't be reached, and nothing of this start was sent")


def _print_missing(run: RunDirectory, names: Sequence[str], what: str) -> None:
    if names:
        print_stderr(
            f"paceline: {' and '.join(names)} {what} (why: {run.tracker_log}). "
            f"{run.steps_csv.name} and {run.metrics_csv.name} have everything"
        )


def _wait(feeders: Feeders, ended_s: float, most_s: float = math.inf) -> list[str]:
    """Wait until all have ended, each at most for its own limit. Returns who still runs.

    Args:
        ended_s: When the training ended.
        most_s: A limit for all.
    """
    while True:
        after_s = time.monotonic() - ended_s
        running = {name: feeder for name, feeder in feeders.items() if feeder.is_running}
        # One that connects meanwhile has more time from then on.
        if all(after_s >= min(most_s, feeder.limit_s(ended_s)) for feeder in running.values()):
            return list(running)
        time.sleep(_EVERY_S)


def _end(feeders: Feeders) -> None:
    """End processes, with those that they have started."""
    for process in (feeder.process for feeder in feeders.values()):
        if process.returncode is None:  # not reaped: its group's number is nobody else's yet
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
