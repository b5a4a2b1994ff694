"""Starts the processes that feed trackers, and waits for them when the training is over."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from paceline.metrics.options import MetricsOptions
from paceline.options.shell import command_line
from paceline.options.text import say
from paceline.results.run_directory import RunDirectory
from paceline.runtime.write_report import CutShortError, cut_short_by_signals
from paceline.tracking.__main__ import ALONE, BESIDE

LIMIT_S = 30.0
"""From the end of a training until what isn't delivered is left to `paceline track`."""
_SAY_AFTER_S = 1.0
_SPARE_S = 2.0
"""The processes end themselves at the limit; this is for those that don't."""

Processes = Mapping[str, "subprocess.Popen[bytes]"]
"""By the name of the tracker."""


@contextmanager
def tracked(run: RunDirectory, options: MetricsOptions, *, quiet: bool = False) -> Iterator[None]:
    """Have the run shown at trackers while the block runs, and wait at its end for what is left.

    Called by the one process that owns the run directory. Does nothing without `--tracker`.

    Args:
        run: The run directory; made, and locked. A summary of an earlier start is removed.
        options: Which trackers; `require_trackers` has passed them.
        quiet: Say only what goes wrong.
    """
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        if options.tracker:
            run.remove_summary()  # to them it is the end
        for name in dict.fromkeys(options.tracker):
            try:
                processes[name] = _start(BESIDE, run, name, options, *(["quiet"] if quiet else []))
            except OSError as error:  # no memory, too many processes: the training goes on
                say(f"paceline: --tracker {name} can't be fed: {error.strerror}")
        yield
    finally:
        if processes:
            _finish(run, processes, quiet=quiet)


def track(run: RunDirectory, options: MetricsOptions) -> Sequence[str]:
    """Feed trackers from a run that is over, or until it is. Blocks; Ctrl-C ends it.

    Returns:
        Names of the trackers that haven't been given everything.
    """
    processes = {name: _start(ALONE, run, name, options) for name in options.tracker}
    try:
        return [name for name, process in processes.items() if process.wait() != 0]
    finally:
        _end(processes)


def _start(
    how: str, run: RunDirectory, name: str, options: MetricsOptions, *more: str
) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own: the terminal's Ctrl-C is the training's."""
    words = (how, str(run.path), name, options.tracker_project or "", str(LIMIT_S), *more)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "paceline.tracking", *words],
        stdin=subprocess.PIPE if how == BESIDE else subprocess.DEVNULL,
        start_new_session=True,
    )


def _finish(run: RunDirectory, processes: Processes, *, quiet: bool) -> None:
    """Wait for the processes, and say what isn't delivered."""
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()  # by which they see the end
    trained = run.run_json.exists()
    try:
        with cut_short_by_signals():
            if not _wait(processes, _SAY_AFTER_S) and trained:
                listed = " and ".join(n for n, p in processes.items() if p.poll() is None)
                if not quiet:
                    say(f"Sending the rest to {listed}, for at most {LIMIT_S:g} s (Ctrl-C ends it)")
                _wait(processes, LIMIT_S + _SPARE_S - _SAY_AFTER_S)
    except CutShortError:
        pass
    _end(processes)
    late = [name for name, process in processes.items() if process.returncode != 0]
    if late and trained:
        again = command_line("track", run.path, *(w for n in late for w in ("--tracker", n)))
        say(
            f"paceline: {' and '.join(late)} didn't get everything (why: {run.tracker_log}). "
            f"Send the rest later: {again}"
        )


def _wait(processes: Processes, limit_s: float) -> bool:
    """Wait until all have ended, at most so long; tell whether they have."""
    deadline_s = time.monotonic() + limit_s
    for process in processes.values():
        try:
            process.wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return False
    return True


def _end(processes: Processes) -> None:
    """End processes, with those that they have started."""
    for process in processes.values():
        if process.returncode is None:  # not reaped: its group's number is nobody else's yet
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
