"""Oversees the workers of one attempt: tells of stragglers, and ends the attempt when it hangs."""

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, final

from paceline.launch.error_records import record
from paceline.launch.watchdog.hang_detector import Hang, HangLimits, judge
from paceline.launch.watchdog.live_stats import live_path, remove_live, write_live
from paceline.launch.watchdog.report import all_stacks, failures_of, render
from paceline.launch.watchdog.stack_dump import collect_stacks
from paceline.launch.watchdog.stragglers import Speeds
from paceline.launch.watchdog.worker_poller import LOOK_EVERY_S, Lookout
from paceline.launch.watchdog.worker_state import WorkerState
from paceline.results.run_directory import log_path

_LOOKS_A_LIMIT = 10
_END_S = 10.0


class Overseer(Protocol):
    """Watches over the workers of one attempt on this host; must hold up nothing."""

    def begin(self, lookout: Lookout, kill: Callable[[], None]) -> None:
        """The workers run.

        Args:
            lookout: Sees them.
            kill: Kills them all, at once; may be called from any thread.
        """

    def end(self) -> None:
        """The workers have ended; waits for what is still going on."""


@final
class LocalOverseer:
    """Oversees an attempt whose workers are all on this host, by a thread of the launcher."""

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
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, lookout: Lookout, kill: Callable[[], None]) -> None:
        """Start watching."""
        arguments = (lookout, kill)
        self._thread = threading.Thread(
            target=self._watch, args=arguments, name="paceline-overseer", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_END_S)
        remove_live(live_path(self._log_dir))

    def _watch(self, lookout: Lookout, kill: Callable[[], None]) -> None:
        speeds = Speeds()
        while not self._ended.wait(look_every_s(self._limits)):
            states = lookout.look()
            tell_speeds(speeds, states, live_path(self._log_dir), self._tell)
            if judge(states, self._limits) is not None and self._end_hang(lookout, states):
                kill()
                return

    def _end_hang(self, lookout: Lookout, states: Sequence[WorkerState]) -> bool:
        """Write down who hangs where; False where the training went on meanwhile."""
        stacks = collect_stacks(states, logs_of(self._log_dir, states))
        states = lookout.look()
        hang = judge(states, self._limits)
        if hang is None or self._ended.is_set():
            return False
        path = self._log_dir / f"hang-{self._attempt}.txt"
        self._say(above_progress(write_report(path, hang, states, stacks)))
        for failure in failures_of(hang, states, stacks):
            record(failure, self._log_dir)
        return True

    def _tell(self, line: str) -> None:
        self._say(above_progress(line))
        with suppress(OSError), log_path(self._log_dir, 0).open("a") as file:
            file.write(line + "\n")


def above_progress(text: str) -> str:
    """Have a text take the place of a worker's progress line on a terminal, which is redrawn."""
    return f"\r\x1b[2K{text}" if sys.stderr.isatty() else text


def look_every_s(limits: HangLimits) -> float:
    """Choose how often to look, so that a short limit isn't missed by far."""
    return min(LOOK_EVERY_S, limits.least_s / _LOOKS_A_LIMIT)


def tell_speeds(
    speeds: Speeds, states: Sequence[WorkerState], path: Path, tell: Callable[[str], None]
) -> None:
    """Publish the workers' speeds, and tell of those that keep the others waiting."""
    found = speeds.update(states)
    write_live(path, found)
    for straggler in speeds.stragglers(found):
        tell(straggler.line())


def logs_of(log_dir: Path, states: Sequence[WorkerState]) -> dict[int, Path]:
    """Name the workers' logs by rank."""
    return {state.rank: log_path(log_dir, state.rank) for state in states}


def write_report(
    path: Path, hang: Hang, states: Sequence[WorkerState], stacks: Mapping[int, str]
) -> str:
    """Write the report with all stacks to a file; give what the user is told."""
    told = render(hang, states, stacks)
    with suppress(OSError):  # a full disk must not keep a hang from being ended
        path.write_text(f"{told}\n\n{all_stacks(states, stacks)}\n")
    return f"{told}\nAll stacks: {path}"
