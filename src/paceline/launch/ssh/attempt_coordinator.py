"""Runs one attempt on all hosts: inspects them, assigns ranks, then starts, watches and ends it."""

import queue
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import final

from paceline.errors import InfrastructureError, JobError, UsageError
from paceline.launch.errors.failures import WorkerFailure
from paceline.launch.processes import EXIT_S
from paceline.launch.signals import InterruptedStartError
from paceline.launch.ssh.artifact_transfer import keep_file
from paceline.launch.ssh.connection import Connection, Event
from paceline.launch.ssh.launch_spec import LaunchSpec
from paceline.launch.ssh.participants import (
    GracefulShutdown,
    Participant,
    Problems,
    StopState,
    attribute_failures,
    problem_of,
    send_all,
)
from paceline.launch.ssh.protocol import Message
from paceline.launch.ssh.rank_assignment import (
    HostInfo,
    attribute_unreachable,
    differences,
    first_ranks,
    others_of,
)
from paceline.launch.ssh.remote_watchdog import RemoteWatchdog
from paceline.options.fields import read_dataclass

MODULE = "paceline.launch.hosts.attempt"
LOOK_S = 120.0
"""For a host to import torch and report its facts; a cold file system takes its time."""
_REACH_S = 30.0
_POLL_S = 0.1


@final
class AttemptCoordinator:
    """The hosts that take part in one attempt."""

    def __init__(
        self,
        spec: LaunchSpec,
        attempt: int,
        show: Callable[[str, str, bool], None],
        stop: StopState,
        watchdog: RemoteWatchdog | None,
    ) -> None:
        """Begin an attempt.

        Args:
            show: Is given a host's name, a line that was printed there, and whether to stderr.
        """
        self._watchdog = watchdog
        self._hang: list[WorkerFailure] = []
        self._spec = spec
        self._attempt = attempt
        self._show = show
        self._stop = stop
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._members: list[Participant] = []
        self._problems: Problems = {}
        self._reported: set[str] = set()

    @property
    def members(self) -> Sequence[Participant]:
        """Those that take part, in the order of their ranks."""
        return self._members

    def inspect(self, connections: Sequence[Connection]) -> None:
        """Start this attempt's process on each host, and wait for the facts that it reports.

        Raises:
            InterruptedStartError: The user wants to stop.
        """
        self._members = [
            Participant(
                remote=connection.start(
                    MODULE, self._spec.message(connection, self._attempt), inbox=self._inbox
                )
            )
            for connection in connections
        ]
        self._problems = self._wait_for(
            lambda member: member.info is not None, LOOK_S, "looked around"
        )

    def problems(self) -> Problems:
        """Say which hosts have reported no facts."""
        return self._problems

    def drop(self, names: Collection[str]) -> None:
        """Go on without some hosts."""
        for member in self._members:
            if member.name in names and not member.ended:
                member.remote.end()
        self._members = [m for m in self._members if m.name not in names]

    def differing(self, settled: Collection[str]) -> Problems:
        """Say which hosts differ from the others.

        Args:
            settled: Names of hosts that count before the others.
        """
        advice = "All need the same code and versions (--sync-code and --install bring them there)"
        differing = differences(self._infos(), settled)
        return {n: JobError(f"the hosts differ: {text}. {advice}") for n, text in differing.items()}

    def reach(self) -> Problems:
        """Have each host try the others' addresses.

        Returns:
            What is wrong with the host that isn't reached, or with those that are lost by now.

        Raises:
            InterruptedStartError: The user wants to stop.
        """
        infos = self._infos()
        for place, member in enumerate(self._members):
            member.remote.send({"reach": others_of(infos, place)})
        # Hosts that are lost explain addresses that don't answer: they come first.
        lost = self._wait_for(lambda m: m.unreachable is not None, _REACH_S, "tried the others")
        if lost:
            return lost
        unreachable = {m.name: m.unreachable for m in self._members if m.unreachable}
        faulty = attribute_unreachable(unreachable, {info.name: info.address for info in infos})
        return {name: InfrastructureError(text) for name, text in faulty.items()}

    def refuse_to_forget(self) -> None:
        """Refuse to begin again a training whose snapshots are on the launcher's machine alone.

        Raises:
            UsageError: They are.
        """
        run, theirs = self._spec.run, max(info.newest for info in self._infos())
        if run.newest_step() > theirs and not self._spec.is_new:
            raise UsageError(
                f"the newest snapshot here is of step {run.newest_step()}, and the hosts have "
                f"{f'one of step {theirs}' if theirs >= 0 else 'none'}: copy {run.snapshots} to "
                "one of them"
            )

    def go(self) -> None:
        """Assign ranks to every host, and have it start its workers."""
        infos = self._infos()
        firsts = first_ranks(infos)
        files = self._spec.files(self._attempt)
        for place, member in enumerate(self._members):
            member.remote.send(
                {
                    "go": {
                        "node_rank": place,
                        "nodes": len(self._members),
                        "first_rank": firsts[place],
                        "store_port": member.remote.connection.store_port,
                        "files": files if place == 0 else {},
                    }
                }
            )

    def watch(self) -> None:
        """Wait until every host's part is over; the others' is ended once one has failed."""
        end = GracefulShutdown()
        while not all(member.ended for member in self._members):
            # Take a message, look for failures and hangs, and advance the shutdown.
            self._handle_next()
            failed = any(self._has_failed(member) for member in self._members)
            if not failed and self._hangs():
                send_all(self._members, {"kill": True})
            seen = None if self._watchdog is None else self._watchdog.poll().own
            over = failed or bool(self._hang)
            end.advance(self._members, self._stop, failed=over, workers=seen)

    def _hangs(self) -> bool:
        """Look whether the training hangs; true at the one moment when that becomes certain."""
        running = {member.name for member in self._members if member.done is None}
        # Once a part is over the others may rightly wait for its end.
        if self._watchdog is None or self._hang or len(running) < len(self._members):
            return False
        request = partial(send_all, self._members, {"stacks": True})
        self._hang = self._watchdog.advance(running, request) or []
        return bool(self._hang)

    def results(self) -> dict[int, str]:
        """What the workers returned, by rank."""
        merged: dict[int, str] = {}
        for member in self._members:
            results = (member.done or {}).get("results")
            if isinstance(results, dict):
                merged |= {int(rank): str(text) for rank, text in results.items()}
        return merged

    def failures(self) -> tuple[WorkerFailure, ...]:
        """What went wrong, the root cause first.

        Raises:
            InfrastructureError: Nobody says what.
        """
        if self._hang:
            return tuple(self._hang)
        return attribute_failures(self._members, stopping=self._stop.requested)

    @property
    def workers(self) -> int:
        """Over all hosts."""
        return sum(info.workers for info in self._infos())

    def newest(self) -> int:
        """Step of the newest snapshot on any host; -1 for none."""
        steps = [int(str(m.done["newest"])) for m in self._members if m.done and "newest" in m.done]
        return max([*steps, *(info.newest for info in self._infos())], default=-1)

    def end(self) -> None:
        """End every part that still runs."""
        for member in self._members:
            if not member.ended:
                member.remote.end()

    def _infos(self) -> list[HostInfo]:
        return [member.info for member in self._members if member.info is not None]

    def _has_failed(self, member: Participant) -> bool:
        if member.done is not None:
            # Its results are there, and yet its process doesn't end: in time that is a failure.
            late = member.done_s is not None and time.monotonic() > member.done_s + EXIT_S
            return bool(member.done.get("failures")) or late
        return member.ended

    def _wait_for(
        self, is_done: Callable[[Participant], bool], limit_s: float, what: str
    ) -> Problems:
        """Wait until each host has done something. Returns what is wrong with those that haven't.

        Raises:
            InterruptedStartError: The user wants to stop.
        """
        deadline_s = time.monotonic() + limit_s
        while True:
            # Ended and refused hosts aren't waited for: they will say nothing more.
            waiting = [m for m in self._members if not (is_done(m) or m.ended or m.refused)]
            if not waiting or time.monotonic() > deadline_s:
                break
            if self._stop.requested:
                raise InterruptedStartError
            self._handle_next()
        late = f"it had not {what} after {limit_s:g} s"
        return {m.name: problem_of(m, late) for m in self._members if not is_done(m) or m.ended}

    def _handle_next(self) -> None:
        try:
            event = self._inbox.get(timeout=_POLL_S)
        except queue.Empty:
            return
        member = next((m for m in self._members if m.remote is event.remote), None)
        if member is not None:
            self._handle_event(member, event)

    def _handle_event(self, member: Participant, event: Event) -> None:
        if event.kind == "message":
            self._handle_message(member, event.message)
        elif event.kind in ("ended", "lost"):
            member.ended, member.ended_s = True, time.time()
            member.lost = str(event.message.get("text", "")) if event.kind == "lost" else ""
        else:
            text, is_error = str(event.message["text"]), event.kind == "stderr"
            member.last_output = [*member.last_output[-19:], text]
            if member.info is not None or not is_error:  # errors of the start are reported as such
                self._show(member.name, text, is_error)

    def _handle_message(self, member: Participant, message: Message) -> None:
        # By phase: look, reach, refusal; then what comes while workers run; at last the results.
        if "seen" in message:
            seen = message["seen"]
            assert isinstance(seen, dict)
            member.info = read_dataclass(HostInfo, {**seen, "name": member.name})
        elif "unreachable" in message:
            listed = message["unreachable"]
            member.unreachable = [str(n) for n in listed] if isinstance(listed, list) else []
        elif "refused" in message:
            member.refused = (str(message["refused"]), int(str(message["code"])))
        elif "states" in message or "stacks" in message:
            if self._watchdog is not None:
                self._watchdog.receive(member.name, message)
        elif "file" in message:
            problem = keep_file(self._spec.run, message)
            if problem and problem not in self._reported:
                self._reported.add(problem)
                self._show(member.name, problem, True)
            if message["file"] == self._spec.run.run_json.name:
                self._spec.restore_paths()
        elif "results" in message:
            member.done, member.done_s = message, time.monotonic()
