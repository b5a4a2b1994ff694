"""Watches the workers of one attempt on this host, for their launcher."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from paceline.launch.errors.error_records import record
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


@final
class _LocalWorkers:
    """The workers of this host, all that there are."""

    def __init__(self, poller: WorkerPoller, log_dir: Path) -> None:
        self._poller = poller
        self._log_dir = log_dir
        self._states: Sequence[WorkerState] = ()

    def poll(self) -> Observation:
        """Read the workers' states."""
        self._states = self._poller.poll()
        return Observation(own=self._states)

    def examine(self, *, first: bool) -> tuple[Observation, Mapping[int, str]]:
        """Dump the stacks of all workers, then read their states anew."""
        stacks = collect_stacks(self._states, self._log_dir)
        return self.poll(), stacks


def watch_locally(
    limits: HangLimits,
    log_dir: Path,
    print_line: Callable[[str], None],
    attempt: int,
    poller: WorkerPoller,
    kill: Callable[[], None],
) -> PeriodicThread:
    """Watch an attempt by a thread of the launcher, and kill the workers when they hang.

    Args:
        log_dir: Where the workers' logs are; `hang-<attempt>.txt` is written there.
    """

    def warn(line: str) -> None:
        """Print a line, and write it into rank 0's log."""
        print_line(line)
        with suppress(OSError), log_path(log_dir, 0).open("a") as file:
            file.write(line + "\n")

    def is_done() -> bool:
        """Look once; where the workers hang, record that and kill them. True after the kill."""
        # The records come before the kill: the launcher collects them once the workers have ended.
        failures = watchdog.advance()
        for failure in failures or ():
            record(failure, log_dir)
        if failures is not None:
            kill()
        return failures is not None

    workers = _LocalWorkers(poller, log_dir)
    watchdog = Watchdog(workers, limits, log_dir, attempt, print_line, warn=warn)
    return PeriodicThread(poll_every_s(limits), is_done)
