"""The hosts' parts in one attempt: how they are ended in order, and which of them is at fault."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from paceline.errors import ExitCode, InfrastructureError, JobError, PacelineError, UsageError
from paceline.launch.errors.failures import WorkerFailure, root_cause
from paceline.launch.processes import PEERS_S
from paceline.launch.restart_policy import StopGrace, stopping_line
from paceline.launch.ssh.connection import RemoteProcess
from paceline.launch.ssh.protocol import Message
from paceline.launch.ssh.rank_assignment import HostInfo, first_ranks
from paceline.launch.watchdog.worker_state import WorkerState

_KILL_S = 5.0
"""From an order to kill until a host's agent does it."""


@dataclass(kw_only=True)
class Participant:
    """One host's part of an attempt."""

    remote: RemoteProcess
    info: HostInfo | None = None
    unreachable: Sequence[str] | None = None
    refused: tuple[str, int] | None = None
    """What it said instead of taking part, and the exit code for it."""
    done: Message | None = None
    """What became of its workers."""
    done_s: float | None = None
    """When that came, by `time.monotonic`."""
    lost: str = ""
    ended: bool = False
    ended_s: float | None = None
    """When, by our clock in seconds since the epoch."""
    killed: bool = False
    """Whether its agent was told to kill it: its end then says nothing."""
    last_output: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The host's."""
        return self.remote.host.name


@final
class StopState:
    """The user's request to stop, as a launch's `Interrupts` passes it on. Takes no locks."""

    def __init__(self, print_line: Callable[[str], None] = lambda line: None) -> None:
        """Create the stop state.

        Args:
            print_line: Tells the user what is waited for.
        """
        self.requested = False
        self.kill_now = False
        self.grace = StopGrace()
        """How long hosts may take."""
        self.print_line = print_line

    def request_stop(self, since_s: float, grace: StopGrace) -> None:
        """Ask to stop."""
        self.grace = grace
        self.requested = True

    def kill(self) -> None:
        """Order to kill."""
        self.kill_now = True


@final
class GracefulShutdown:
    """Ends an attempt in order: hosts stop first, then kill their workers, then their agents do."""

    def __init__(self) -> None:
        self._began_s: float | None = None
        self._grace_s = 0.0
        self._stops = False
        self._ordered_kill = False
        self._killed = False

    def advance(
        self,
        members: Sequence[Participant],
        stop: StopState,
        *,
        failed: bool,
        workers: Sequence[WorkerState] | None = (),
    ) -> None:
        """Do what is due now.

        Args:
            failed: Whether a part has failed, or the training hangs.
            workers: What the hosts have reported last of their workers; None: they don't report.
        """
        now_s = time.monotonic()
        # It begins with a request to stop or with the first failure.
        if self._began_s is None:
            if stop.requested:
                send_all(members, {"stop": True})
            elif not failed:
                return
            self._began_s = now_s
            # Settled here: a request that follows on a failure must not delay the end.
            self._stops, self._grace_s = stop.requested, PEERS_S
            self._allow(stop, workers)
        # A host gives its workers more time where they write a snapshot by then.
        if now_s - self._began_s >= self._grace_s:
            self._allow(stop, workers, is_late=True)
        # Each stage is due at its time after that: the hosts' own grace,
        late_s = now_s - self._began_s - (0.0 if stop.kill_now else self._grace_s)
        # then an order to kill the workers,
        if not self._ordered_kill and late_s >= 0:
            self._ordered_kill = True
            send_all(members, {"kill": True})
        # then the agent kills the host's process,
        if not self._killed and late_s > _KILL_S:
            self._killed = True
            for member in members:
                member.killed = not member.ended
                member.remote.end()
        # and at last nobody is waited for.
        if late_s > 2 * _KILL_S:  # its agent lives, and can't kill it
            for member in members:
                member.ended = True

    def _allow(
        self, stop: StopState, workers: Sequence[WorkerState] | None, *, is_late: bool = False
    ) -> None:
        """Settle how long a stop may take, and tell the user."""
        if not self._stops:
            return
        before_s, grace = self._grace_s, stop.grace
        allowed_s = grace.most_s
        if workers is not None:
            allowed_s = grace.for_workers((w.reading for w in workers), is_late=is_late)
        self._grace_s = max(before_s, allowed_s + PEERS_S)
        has_begun = any(worker.reading.step is not None for worker in workers or ())
        if self._grace_s > before_s and has_begun:
            left_s = self._grace_s - before_s if is_late else allowed_s
            stop.print_line(stopping_line(left_s, is_late=is_late))


def send_all(members: Sequence[Participant], message: Mapping[str, object]) -> None:
    """Send a message to every part that still runs."""
    for member in members:
        if not member.ended:
            member.remote.send(message)


Problems = Mapping[str, PacelineError]
"""By the host's name, what is wrong with it."""

_KINDS = {ExitCode.USAGE: UsageError, ExitCode.JOB: JobError}


def problem_of(member: Participant, late: str) -> PacelineError:
    """Say what is wrong with a host that hasn't done what it should.

    Args:
        late: What is said of one that is only late.
    """
    if member.refused is not None:
        text, code = member.refused
        kind = _KINDS.get(ExitCode(code), InfrastructureError)
        return kind(f"{member.name}: {text}")
    if member.lost:
        return InfrastructureError(member.lost)
    if member.ended:
        output = "\n".join(member.last_output) or "it said nothing"
        return InfrastructureError(f"{member.name}: its process ended:\n{output}")
    return InfrastructureError(f"{member.name}: {late}")


def raise_first(problems: Problems) -> None:
    """Raise what is wrong with the hosts, as one error; nothing where all is well.

    Raises:
        PacelineError: Of the first host's kind, with all that is said.
    """
    errors = list(problems.values())
    if errors:
        raise type(errors[0])("\n".join(dict.fromkeys(map(str, errors))))


def attribute_failures(
    members: Sequence[Participant], *, stopping: bool
) -> tuple[WorkerFailure, ...]:
    """List an attempt's failures, the root cause first.

    Args:
        members: All parts, in the order of their ranks.

    Raises:
        InfrastructureError: There are no results, and nobody says why.
    """
    firsts = first_ranks([member.info for member in members if member.info is not None])
    failures: list[WorkerFailure] = []
    silent: list[WorkerFailure] = []
    for first, member in zip(firsts, members, strict=True):
        # What hosts report; a host without results is a failure itself, unless we have killed it.
        failures += _reported(member)
        if member.done is None and (member.lost or not stopping):
            (silent if member.killed else failures).append(_of_host(member, first))
    failures = failures or silent
    if not failures and not stopping:
        raise InfrastructureError("the workers ended without results, and none said why")
    return root_cause(failures)


def _reported(member: Participant) -> Iterator[WorkerFailure]:
    """Read a host's failures: with the user's name for the host, and times by our clock."""
    listed = (member.done or {}).get("failures")
    ahead_s = member.remote.connection.clock_offset_s or 0.0
    for content in listed if isinstance(listed, list) else []:
        failure = WorkerFailure.from_json(content)
        time_s = failure.time_s - ahead_s if failure.time_s is not None else None
        yield replace(failure, host=member.name, time_s=time_s)


def _of_host(member: Participant, first_rank: int) -> WorkerFailure:
    """Describe a host that went away, as a failure of its first worker."""
    output = "\n".join(member.last_output)
    refusal, code = member.refused or ("", ExitCode.INFRASTRUCTURE)
    why = member.lost or refusal or "its processes ended without a word"
    return WorkerFailure(
        rank=first_rank,
        host=member.name,
        kind="job" if code in (ExitCode.USAGE, ExitCode.JOB) else "infrastructure",
        message=f"the host is lost: {why}" if member.lost else why,
        traceback="" if member.lost else output,
        time_s=member.ended_s,
    )
