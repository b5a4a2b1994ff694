"""The hosts' parts in one attempt, and how they are ended in order."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from paceline.launch.processes import PEERS_S
from paceline.launch.restart_policy import STOP_S
from paceline.launch.ssh.protocol import Message
from paceline.launch.ssh.rank_assignment import Sight
from paceline.launch.ssh.remote_process import Remote

_KILL_S = 5.0
"""From an order to kill until a host's guard does it."""


@dataclass(kw_only=True)
class Participant:
    """One host's part of an attempt."""

    remote: Remote
    sight: Sight | None = None
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
    """Whether its guard was told to kill it: its end then says nothing."""
    last_words: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The host's."""
        return self.remote.host.name


@final
class Stopping:
    """The user's wish to stop, as a launch's `Interrupts` passes it on. Takes no locks."""

    def __init__(self) -> None:
        self.stop = False
        self.kill_now = False
        self.stop_s = STOP_S
        """How long hosts may take."""

    def request_stop(self, since_s: float, stop_s: float) -> None:
        """Ask to stop."""
        self.stop_s = stop_s
        self.stop = True

    def kill(self) -> None:
        """Order to kill."""
        self.kill_now = True


@final
class OrderlyEnd:
    """Ends an attempt in order: hosts are asked first, then told, then their guards kill."""

    def __init__(self) -> None:
        self._asked_s: float | None = None
        self._told = False
        self._killed = False

    def advance(self, members: Sequence[Participant], stopping: Stopping, *, failed: bool) -> None:
        """Do what is due now."""
        now_s = time.monotonic()
        if self._asked_s is None:
            if stopping.stop:
                tell_all(members, {"stop": True})
            elif not failed:
                return
            self._asked_s = now_s
        grace_s = stopping.stop_s + PEERS_S if stopping.stop else PEERS_S
        late_s = now_s - self._asked_s - (0.0 if stopping.kill_now else grace_s)
        if not self._told and late_s >= 0:
            self._told = True
            tell_all(members, {"kill": True})
        if not self._killed and late_s > _KILL_S:
            self._killed = True
            for member in members:
                member.killed = not member.ended
                member.remote.end()
        if late_s > 2 * _KILL_S:  # its guard lives, and can't kill it
            for member in members:
                member.ended = True


def tell_all(members: Sequence[Participant], message: Mapping[str, object]) -> None:
    """Send a message to every part that still runs."""
    for member in members:
        if not member.ended:
            member.remote.say(message)
