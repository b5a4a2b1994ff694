"""The loop that watches workers for hangs and stragglers, the same wherever they run.

Its caller passes in where their states come from, and what is done about a hang:
`local_watchdog` for one host's workers of its launcher, `ssh.remote_watchdog` for those of several
hosts, and `sidecar_main` for a node's workers that something else has started.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

from paceline.launch.errors.failures import WorkerFailure
from paceline.launch.watchdog.hang_detector import Hang, HangLimits, detect_hang
from paceline.launch.watchdog.report import failures_of, write_report
from paceline.launch.watchdog.stragglers import Speeds
from paceline.launch.watchdog.worker_poller import POLL_EVERY_S, WorkerPoller
from paceline.launch.watchdog.worker_state import WorkerState

_POLLS_A_LIMIT = 10
_END_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Observation:
    """The workers of a training at one moment."""

    own: Sequence[WorkerState]
    """Those whose speeds and failures this watchdog reports, in rank order."""
    others: Sequence[WorkerState] = ()
    """Those that another watchdog reports."""
    unseen: int = 0
    """How many more there are, of which nothing is known."""


class ObservedWorkers(Protocol):
    """Where a watchdog's observations come from."""

    def poll(self) -> Observation:
        """Read the workers' states; called about every second."""

    def examine(self, *, first: bool) -> tuple[Observation, Mapping[int, str]] | None:
        """Collect the stacks of workers that seem to hang, and read their states once more.

        Args:
            first: Whether they didn't seem to hang a poll ago.

        Returns:
            The workers, and stacks by rank; None while some may still answer: asked again after the
            next poll, if they seem to hang then.
        """


@final
class Watchdog:
    """Watches over one attempt: warns of stragglers, and reports a hang."""

    def __init__(
        self,
        workers: ObservedWorkers,
        limits: HangLimits,
        log_dir: Path,
        attempt: int,
        print_line: Callable[[str], None],
        *,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        """Begin with one attempt.

        Args:
            log_dir: `hang-<attempt>.txt` is written there.
            print_line: Shows the user the report of a hang.
            warn: Shows the user a line about a straggler; `print_line` by default.
        """
        self._workers = workers
        self._limits = limits
        self._report = log_dir / f"hang-{attempt}.txt"
        self._print_line = print_line
        self._warn = warn or print_line
        self._speeds = Speeds()
        self._suspected = False

    def advance(self) -> list[WorkerFailure] | None:
        """Poll the workers once, and report a hang once it is certain.

        Returns:
            Failures of this watchdog's own workers once the training hangs, perhaps none; else
            None.
        """
        # Poll. Speeds of workers that seem to hang would only mislead.
        seen = self._workers.poll()
        if not self._suspected:
            for straggler in self._speeds.stragglers(self._speeds.update(seen.own)):
                self._warn(straggler.line())
        if self._hang(seen) is None:
            self._suspected = False
            return None
        # It may have gone on while the stacks were collected.
        examined = self._workers.examine(first=not self._suspected)
        self._suspected = examined is None
        if examined is None:
            return None
        seen, stacks = examined
        hang = self._hang(seen)
        # Certain only if they hang in the newest observation as well.
        return None if hang is None else self._report_hang(hang, seen, stacks)

    def _hang(self, seen: Observation) -> Hang | None:
        return detect_hang(_everyone(seen), self._limits, seen.unseen)

    def _report_hang(
        self, hang: Hang, seen: Observation, stacks: Mapping[int, str]
    ) -> list[WorkerFailure]:
        everyone, own = _everyone(seen), {state.rank for state in seen.own}
        if everyone[0].rank in own:  # one of several watchdogs warns the user
            self._print_line(write_report(self._report, hang, everyone, stacks))
        return [f for f in failures_of(hang, everyone, stacks) if f.rank in own]


def _everyone(seen: Observation) -> list[WorkerState]:
    return sorted([*seen.own, *seen.others], key=lambda state: state.rank)


def poll_every_s(limits: HangLimits) -> float:
    """Choose how often to poll, so that a short limit isn't missed by far."""
    return min(POLL_EVERY_S, limits.least_s / _POLLS_A_LIMIT)


@final
class PeriodicThread:
    """A thread that calls a function regularly until it is done."""

    def __init__(self, every_s: float, is_done: Callable[[], bool]) -> None:
        """Start it.

        Args:
            every_s: Between two calls.
            is_done: What is called, until it says that it is done.
        """
        self._ended = threading.Event()

        def run() -> None:
            while not self._ended.wait(every_s) and not is_done():
                pass

        self._thread = threading.Thread(target=run, name="paceline-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End it; waits for a call that is going on, but for some seconds only."""
        self._ended.set()
        # With a limit: the call may hang in a file system that is gone.
        self._thread.join(_END_S)


Watch = Callable[[WorkerPoller, Callable[[], None]], PeriodicThread]
"""Begins to watch the workers of one attempt on this host, by a poller that sees them. The function
kills them all, at once, and may be called from any thread. Stopped once they have ended."""
