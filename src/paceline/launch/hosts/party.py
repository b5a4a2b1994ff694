"""One attempt on all hosts, seen from the launcher: looked at, seated, started, watched, ended."""

import queue
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import final

from paceline.config.rundir import RunDirectory
from paceline.errors import ExitCode, InfrastructureError, JobError, UsageError
from paceline.launch.failures import WorkerFailure, root_cause
from paceline.launch.hosts.connection import Connection, Event
from paceline.launch.hosts.courier import keep_file
from paceline.launch.hosts.members import Ending, Member, Stopping, tell_all
from paceline.launch.hosts.overseeing import Oversight
from paceline.launch.hosts.seats import (
    Sight,
    differences,
    first_ranks,
    others_of,
    unreachable_text,
)
from paceline.launch.hosts.wire import Message
from paceline.launch.monitor.judging import HangLimits

MODULE = "paceline.launch.hosts.attempt"
LOOK_S = 120.0
"""For a host to import torch and look around; a cold file system takes its time."""
_REACH_S = 30.0
_POLL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is the same for all hosts and attempts."""

    entry: str
    payload: str
    """Of the entry; `inspect` makes it fit the host."""
    inspect: str
    """`package.module:function`, run on each host: what is there, who is to be started."""
    run: RunDirectory
    """The launcher's own."""
    run_dir: str
    """On the hosts: absolute, or relative to their working directories."""
    token: str
    """Name of a file in the launcher's run directory, by which hosts know it."""
    is_new: bool
    preload: tuple[str, ...]
    paths: tuple[str, ...]
    """Names of arguments in the payload that are paths."""
    hang: HangLimits | None = None
    """After how long the training hangs; None: nobody looks."""

    def message(self, connection: Connection, attempt: int) -> Message:
        """Write it for one host."""
        said = connection.introduction
        return {
            "entry": self.entry,
            "payload": self.payload,
            "inspect": self.inspect,
            "run_dir": self.run_dir,
            "token": self.token,
            "is_new": self.is_new and attempt == 0,
            "preload": list(self.preload),
            "paths": list(self.paths),
            "hang": None if self.hang is None else asdict(self.hang),
            "attempt": attempt,
            "workers": connection.host.slots,
            "address": connection.host.address,
            "ssh_address": said.ssh_address if said is not None else "",
        }


@final
class Party:
    """The hosts that take part in one attempt."""

    def __init__(
        self,
        order: Order,
        attempt: int,
        show: Callable[[str, str, bool], None],
        stopping: Stopping,
        oversight: Oversight | None,
    ) -> None:
        """Begin an attempt.

        Args:
            order: What is to be done.
            attempt: Its number.
            show: Is given a host's name, a line that was printed there, and whether to stderr.
            stopping: The user's wish to stop.
            oversight: Judges over the workers while they run.
        """
        self._oversight = oversight
        self._hang: list[WorkerFailure] = []
        self._order = order
        self._attempt = attempt
        self._show = show
        self._stopping = stopping
        self._inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._members: list[Member] = []

    @property
    def members(self) -> Sequence[Member]:
        """Those that take part, in the order of their ranks."""
        return self._members

    def look(self, connections: Sequence[Connection]) -> None:
        """Start this attempt's process on each host, and hear what it sees.

        Raises:
            PacelineError: A host refuses; the message is its own.
        """
        self._members = [
            Member(
                remote=connection.start(
                    MODULE, self._order.message(connection, self._attempt), inbox=self._inbox
                )
            )
            for connection in connections
        ]
        self._wait_for(lambda member: member.sight is not None, LOOK_S, "looked around")

    def drop(self, names: Sequence[str]) -> None:
        """Go on without some hosts."""
        for member in self._members:
            if member.name in names and not member.ended:
                member.remote.end()
        self._members = [m for m in self._members if m.name not in names]

    def drop_lost(self) -> None:
        """Go on without those that are lost by now."""
        self.drop([member.name for member in self._members if member.lost])

    def differing(self) -> list[str]:
        """Say in what the hosts differ, a line for each."""
        return differences(self._sights())

    def reach(self) -> str:
        """Have each host try the others' addresses. Returns what is wrong; empty where all is well.

        Raises:
            PacelineError: A host refuses.
        """
        sights = self._sights()
        for place, member in enumerate(self._members):
            member.remote.say({"reach": others_of(sights, place)})
        self._wait_for(lambda member: member.unreachable is not None, _REACH_S, "tried the others")
        found = {m.name: m.unreachable for m in self._members if m.unreachable}
        return unreachable_text(found, {s.name: s.address for s in sights}) if found else ""

    def go(self) -> None:
        """Give every host its seat and have it start its workers."""
        sights = self._sights()
        firsts = first_ranks(sights)
        files = self._files()
        for place, member in enumerate(self._members):
            member.remote.say(
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
        end = Ending()
        while not all(member.ended for member in self._members):
            self._take_next()
            failed = any(self._has_failed(member) for member in self._members)
            if not failed and self._hangs():
                tell_all(self._members, {"kill": True})
            end.advance(self._members, self._stopping, failed=failed or bool(self._hang))
        if self._oversight is not None:
            self._oversight.end()

    def _hangs(self) -> bool:
        """Look whether the training hangs; true at the one moment when that becomes certain."""
        running = {member.name for member in self._members if member.done is None}
        if self._oversight is None or self._hang or len(running) < len(self._members):
            return False
        ask = partial(tell_all, self._members, {"stacks": True})
        self._hang = self._oversight.advance(running, ask)
        return bool(self._hang)

    def results(self) -> dict[int, str]:
        """What the workers returned, by rank."""
        found: dict[int, str] = {}
        for member in self._members:
            results = (member.done or {}).get("results")
            if isinstance(results, dict):
                found |= {int(rank): str(text) for rank, text in results.items()}
        return found

    def failures(self) -> tuple[WorkerFailure, ...]:
        """What went wrong, the root cause first."""
        firsts = first_ranks(self._sights())
        if self._hang:
            return tuple(self._hang)
        found: list[WorkerFailure] = []
        for first, member in zip(firsts, self._members, strict=True):
            found += self._told(member)
            if member.done is None and (member.lost or not self._stopping.stop):
                found.append(_of_host(member, first))
        if not found and not self._stopping.stop:
            raise InfrastructureError("the workers ended without results, and none said why")
        return root_cause(found)

    @property
    def workers(self) -> int:
        """Over all hosts."""
        return sum(sight.workers for sight in self._sights())

    def newest(self) -> int:
        """Step of the newest snapshot on any host; -1 for none."""
        steps = [int(str(m.done["newest"])) for m in self._members if m.done and "newest" in m.done]
        return max([*steps, *(sight.newest for sight in self._sights())], default=-1)

    def end(self) -> None:
        """End every part that still runs."""
        for member in self._members:
            if not member.ended:
                member.remote.end()

    def _sights(self) -> list[Sight]:
        return [member.sight for member in self._members if member.sight is not None]

    def _files(self) -> dict[str, str]:
        """What the launcher has of the run, for a host that leads it from now on."""
        run = self._order.run
        if self._attempt == 0 and self._order.is_new:
            return {}
        paths = (run.run_json, run.metrics_csv)
        return {path.name: path.read_text() for path in paths if path.exists()}

    def _told(self, member: Member) -> Iterator[WorkerFailure]:
        """Give a host's failures under the name that the user has for it, in our clock's time."""
        listed = (member.done or {}).get("failures")
        ahead_s = member.remote.connection.clock_offset_s or 0.0
        for content in listed if isinstance(listed, list) else []:
            failure = WorkerFailure.from_json(content)
            time_s = failure.time_s - ahead_s if failure.time_s is not None else None
            yield replace(failure, host=member.name, time_s=time_s)

    def _has_failed(self, member: Member) -> bool:
        if member.done is not None:
            return bool(member.done.get("failures"))
        return member.ended

    def _wait_for(self, is_done: Callable[[Member], bool], limit_s: float, what: str) -> None:
        deadline_s = time.monotonic() + limit_s
        while True:
            waiting = [m for m in self._members if not (is_done(m) or m.lost)]
            refused = [m for m in self._members if m.refused is not None]
            if refused:
                raise _refusal(refused[0])
            if not waiting:
                return
            if any(member.ended for member in waiting):
                gone = next(member for member in waiting if member.ended)
                text = "\n".join(gone.last_words) or "it said nothing"
                raise InfrastructureError(f"{gone.name} ended before it had {what}:\n{text}")
            if time.monotonic() > deadline_s:
                names = ", ".join(member.name for member in waiting)
                raise InfrastructureError(f"{names} had not {what} after {limit_s:g} s")
            if self._stopping.stop:
                raise KeyboardInterrupt
            self._take_next()

    def _take_next(self) -> None:
        try:
            event = self._inbox.get(timeout=_POLL_S)
        except queue.Empty:
            return
        member = next((m for m in self._members if m.remote is event.remote), None)
        if member is not None:
            self._take(member, event)

    def _take(self, member: Member, event: Event) -> None:
        if event.kind == "said":
            self._hear(member, event.message)
        elif event.kind in ("ended", "lost"):
            member.ended = True
            member.lost = str(event.message.get("text", "")) if event.kind == "lost" else ""
        else:
            text = str(event.message["text"])
            member.last_words = [*member.last_words[-19:], text]
            if member.sight is not None:  # before, it is an error of the start, told as such
                self._show(member.name, text, event.kind == "stderr")

    def _hear(self, member: Member, said: Message) -> None:
        if "seen" in said:
            seen = said["seen"]
            assert isinstance(seen, dict)
            member.sight = Sight.read(member.name, seen)
        elif "unreachable" in said:
            listed = said["unreachable"]
            member.unreachable = [str(n) for n in listed] if isinstance(listed, list) else []
        elif "refused" in said:
            member.refused = (str(said["refused"]), int(str(said["code"])))
        elif "states" in said or "stacks" in said:
            if self._oversight is not None:
                self._oversight.hear(member.name, said)
        elif "file" in said:
            keep_file(self._order.run, said)
        else:
            member.done = said


def _refusal(member: Member) -> Exception:
    text, code = member.refused or ("", 0)
    kinds = {ExitCode.USAGE: UsageError, ExitCode.JOB: JobError}
    return kinds.get(ExitCode(code), InfrastructureError)(f"{member.name}: {text}")


def _of_host(member: Member, first_rank: int) -> WorkerFailure:
    """Describe a host that went away, as a failure of its first worker."""
    words = "\n".join(member.last_words)
    refusal, code = member.refused or ("", ExitCode.INFRASTRUCTURE)
    why = member.lost or refusal or "its processes ended without a word"
    return WorkerFailure(
        rank=first_rank,
        host=member.name,
        step=None,
        exit_code=None,
        signal_name=None,
        kind="job" if code in (ExitCode.USAGE, ExitCode.JOB) else "infrastructure",
        error_type="",
        message=f"the host is lost: {why}" if member.lost else why,
        traceback="" if member.lost else words,
        operation="",
        time_s=None,
    )


def show_line(width: int) -> Callable[[str, str, bool], None]:
    """Make what shows hosts' lines: each with its host's name before it.

    Args:
        width: Of the longest name.
    """

    def show(name: str, text: str, is_error: bool) -> None:
        stream = sys.stderr if is_error else sys.stdout
        print(f"{name:{width}} | {text}", file=stream, flush=True)

    return show
