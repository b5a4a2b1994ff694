"""Oversees workers on several hosts: each host looks at its own, the launcher judges over all."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import final

from paceline.launch.failures import WorkerFailure
from paceline.launch.ssh import agent_io
from paceline.launch.ssh.protocol import Message
from paceline.launch.watchdog.hang_detector import HangLimits, judge
from paceline.launch.watchdog.live_stats import live_path, remove_live
from paceline.launch.watchdog.local_watchdog import logs_of, look_every_s, tell_speeds, write_report
from paceline.launch.watchdog.report import failures_of
from paceline.launch.watchdog.stack_dump import collect_stacks
from paceline.launch.watchdog.stragglers import Speeds
from paceline.launch.watchdog.worker_poller import Lookout
from paceline.launch.watchdog.worker_state import WorkerState
from paceline.results.run_directory import RunDirectory

_STACKS_S = 8.0
"""For all hosts to answer with their workers' stacks."""
_END_S = 10.0


@final
class Lookouts:
    """A host's part: tells the launcher how its workers are, and their stacks when asked."""

    def __init__(self, limits: HangLimits, log_dir: Path) -> None:
        self._every_s = look_every_s(limits)
        self._log_dir = log_dir
        self._asked = threading.Event()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def ask(self) -> None:
        """Have the stacks told. Another thread calls it."""
        self._asked.set()

    def begin(self, lookout: Lookout, kill: Callable[[], None]) -> None:
        """Start telling. Killing is left to the launcher's orders."""
        self._thread = threading.Thread(
            target=self._tell, args=(lookout,), name="paceline-lookout", daemon=True
        )
        self._thread.start()

    def end(self) -> None:
        """Stop telling."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_END_S)

    def _tell(self, lookout: Lookout) -> None:
        while not self._ended.wait(self._every_s):
            states = lookout.look()
            agent_io.tell({"states": [state.to_json() for state in states]})
            if self._asked.is_set():
                self._asked.clear()
                stacks = collect_stacks(states, logs_of(self._log_dir, states))
                agent_io.tell({"stacks": {str(rank): text for rank, text in stacks.items()}})


@final
class Oversight:
    """The launcher's part: judges over the workers of all hosts."""

    def __init__(
        self, limits: HangLimits, run: RunDirectory, attempt: int, say: Callable[[str], None]
    ) -> None:
        """Begin with one attempt.

        Args:
            limits: After how long the training hangs.
            run: The launcher's run directory, where the report is written.
            attempt: Number of the attempt.
            say: Tells the user.
        """
        self._limits = limits
        self._run = run
        self._attempt = attempt
        self._say = say
        self._speeds = Speeds()
        self._states: dict[str, list[WorkerState]] = {}
        self._stacks: dict[int, str] = {}
        self._answered: set[str] = set()
        self._asked_s: float | None = None
        self._looked_s = time.monotonic()

    def hear(self, host: str, message: Message) -> None:
        """Take what a host has told: states, or stacks."""
        states, stacks = message.get("states"), message.get("stacks")
        if isinstance(states, list):
            told = [WorkerState.from_json(state) for state in states]
            self._states[host] = [replace(state, host=host) for state in told]
        if isinstance(stacks, Mapping):
            self._stacks |= {int(rank): str(text) for rank, text in stacks.items()}
            self._answered.add(host)

    def advance(self, hosts: set[str], ask: Callable[[], None]) -> list[WorkerFailure]:
        """Judge, if it is time.

        Args:
            hosts: Those whose workers run.
            ask: Asks all hosts for their workers' stacks.

        Returns:
            The hang's failures, once it is certain and written down; else nothing.
        """
        now_s = time.monotonic()
        if now_s - self._looked_s < look_every_s(self._limits) or set(self._states) != hosts:
            return []
        self._looked_s = now_s
        states = self._all()
        if self._asked_s is None:
            tell_speeds(self._speeds, states, live_path(self._run.logs), self._say)
        if judge(states, self._limits) is None:
            self._asked_s = None
            return []
        if self._asked_s is None:
            self._asked_s, self._answered = now_s, set()
            ask()
            return []
        if self._answered != hosts and now_s - self._asked_s < _STACKS_S:
            return []
        return self._write_down(states)

    def end(self) -> None:
        """The attempt is over."""
        remove_live(live_path(self._run.logs))

    def _all(self) -> list[WorkerState]:
        listed = [state for states in self._states.values() for state in states]
        return sorted(listed, key=lambda state: state.rank)

    def _write_down(self, states: list[WorkerState]) -> list[WorkerFailure]:
        hang = judge(states, self._limits)
        assert hang is not None
        path = self._run.logs / f"hang-{self._attempt}.txt"
        self._say(write_report(path, hang, states, self._stacks))
        return failures_of(hang, states, self._stacks)
