"""Watches the workers of one attempt on this host, for their launcher."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, final

from paceline.launch.error_records import record
from paceline.launch.watchdog.driver import (
    Observation,
    PeriodicThread,
    Watchdog,
    poll_every_s,
)
from paceline.launch.watchdog.hang_detector import HangLimits
from paceline.launch.watchdog.stack_dump import collect_stacks
from paceline.launch.watchdog.worker_poller import WorkerPoller
from paceline.launch.watchdog.worker_state import WorkerState
from paceline.results.run_directory import log_path


class AttemptWatcher(Protocol):
    """Watches over the workers of one attempt on this host; must hold up nothing."""

    def begin(self, poller: WorkerPoller, kill: Callable[[], None]) -> None:
        """The workers run.

        Args:
            poller: Sees them.
            kill: Kills them all, at once; may be called from any thread.
        """

    def end(self) -> None:
        """The workers have ended; waits for what is still going on."""


@final
class _LocalWorkers:
    """The workers of this host, all that there are."""

    def __init__(self, poller: WorkerPoller, log_dir: Path) -> None:
        self._poller = poller
        self._log_dir = log_dir
        self._states: Sequence[WorkerState] = ()

    def poll(self) -> Observation:
        self._states = self._poller.poll()
        return Observation(own=self._states)

    def examine(self, *, first: bool) -> tuple[Observation, Mapping[int, str]]:
        stacks = collect_stacks(self._states, self._log_dir)
        return self.poll(), stacks


@final
class LocalWatchdog:
    """Watches an attempt by a thread of the launcher, and kills the workers when they hang."""

    def __init__(
        self, limits: HangLimits, log_dir: Path, say: Callable[[str], None], attempt: int
    ) -> None:
        """Args:
        limits: After how long the training hangs.
        log_dir: Where the workers' logs are; `hang-<attempt>.txt` is written there.
        say: Tells the user.
        attempt: Number of the attempt.
        """
        self._limits = limits
        self._log_dir = log_dir
        self._attempt = attempt
        self._say = say
        self._thread = PeriodicThread(poll_every_s(limits), "paceline-watchdog")
        self._watchdog: Watchdog | None = None

    def begin(self, poller: WorkerPoller, kill: Callable[[], None]) -> None:
        """Start watching."""
        self._watchdog = watchdog = Watchdog(
            _LocalWorkers(poller, self._log_dir),
            self._limits,
            self._log_dir,
            self._attempt,
            lambda report: self._say(above_progress(report)),
            warn=self._warn,
        )

        def is_done() -> bool:
            failures = watchdog.advance()
            if failures is None:
                return False
            for failure in failures:
                record(failure, self._log_dir)
            kill()
            return True

        self._thread.start(is_done)

    def end(self) -> None:
        """Stop watching."""
        self._thread.stop()
        if self._watchdog is not None:
            self._watchdog.close()

    def _warn(self, line: str) -> None:
        self._say(above_progress(line))
        with suppress(OSError), log_path(self._log_dir, 0).open("a") as file:
            file.write(line + "\n")


def above_progress(text: str) -> str:
    """Have a text take the place of a worker's progress line on a terminal, which is redrawn."""
    return f"\r\x1b[2K{text}" if sys.stderr.isatty() else text
