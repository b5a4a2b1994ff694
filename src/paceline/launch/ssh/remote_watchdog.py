"""Watches workers on several hosts: each host reports its own, the launcher decides over all."""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import final

from paceline.launch.errors.failures import WorkerFailure
from paceline.launch.ssh import agent_io
from paceline.launch.ssh.protocol import Message
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
from paceline.options.fields import read_dataclass
from paceline.results.run_directory import RunDirectory

_STACKS_S = 8.0
"""For all hosts to answer with their workers' stacks."""


@final
class StateReporter:
    """A host's part: reports its workers' states to the launcher, and their stacks on request."""

    def __init__(self, limits: HangLimits, log_dir: Path) -> None:
        self._every_s = poll_every_s(limits)
        self._log_dir = log_dir
        self._requested = threading.Event()

    def request_stacks(self) -> None:
        """Have the stacks reported. Another thread calls it."""
        self._requested.set()

    def start(self, attempt: int, poller: WorkerPoller, kill: Callable[[], None]) -> PeriodicThread:
        """Start reporting. Killing is left to the launcher's messages."""

        def report() -> bool:
            """Send the states, and the stacks where they were requested; never the last time."""
            states = poller.poll()
            agent_io.send({"states": list(map(asdict, states))})
            if self._requested.is_set():
                self._requested.clear()
                stacks = collect_stacks(states, self._log_dir)
                agent_io.send({"stacks": {str(rank): text for rank, text in stacks.items()}})
            return False

        return PeriodicThread(self._every_s, report)


@final
class RemoteWatchdog:
    """The launcher's part: watches over the workers of all hosts, by what these report."""

    def __init__(
        self, limits: HangLimits, run: RunDirectory, attempt: int, print_line: Callable[[str], None]
    ) -> None:
        """Begin with one attempt.

        Args:
            run: The launcher's run directory, where the report is written.
        """
        self._every_s = poll_every_s(limits)
        self._watchdog = Watchdog(self, limits, run.logs, attempt, print_line)
        self._hosts: set[str] = set()
        self._request_stacks: Callable[[], None] = lambda: None
        self._states: dict[str, list[WorkerState]] = {}
        self._stacks: dict[int, str] = {}
        self._answered: set[str] = set()
        self._requested_s = 0.0
        self._polled_s = time.monotonic()

    def receive(self, host: str, message: Message) -> None:
        """Store what a host has reported: states, or stacks."""
        states, stacks = message.get("states"), message.get("stacks")
        if isinstance(states, list):
            reported = [read_dataclass(WorkerState, state, strict=True) for state in states]
            self._states[host] = [replace(state, host=host) for state in reported]
        if isinstance(stacks, Mapping):
            self._stacks |= {int(rank): str(text) for rank, text in stacks.items()}
            self._answered.add(host)

    def advance(
        self, hosts: set[str], request_stacks: Callable[[], None]
    ) -> list[WorkerFailure] | None:
        """Look whether the training hangs, if it is time; called several times a second.

        Args:
            hosts: Those whose workers run.
            request_stacks: Requests the workers' stacks of all hosts.

        Returns:
            The hang's failures, once it is certain and written down; else None.
        """
        now_s = time.monotonic()
        if now_s - self._polled_s < self._every_s or set(self._states) != hosts:
            return None
        self._polled_s, self._hosts, self._request_stacks = now_s, hosts, request_stacks
        return self._watchdog.advance()

    def poll(self) -> Observation:
        """Give what the hosts have reported last."""
        reported = [state for states in self._states.values() for state in states]
        return Observation(own=sorted(reported, key=lambda state: state.rank))

    def examine(self, *, first: bool) -> tuple[Observation, Mapping[int, str]] | None:
        """Request the stacks, and give them once all hosts have answered or should have."""
        if first:
            self._requested_s, self._answered = time.monotonic(), set()
            self._request_stacks()
        waited_s = time.monotonic() - self._requested_s
        if self._answered != self._hosts and waited_s < _STACKS_S:
            return None
        return self.poll(), self._stacks
