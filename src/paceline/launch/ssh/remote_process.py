"""A process on a host, as the launcher sees it: what it says, and what it is told."""

import queue
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, final

from paceline.errors import InfrastructureError
from paceline.launch.ssh.hostfile import Host
from paceline.launch.ssh.protocol import Message

_TAIL_LINES = 30


class HostChannel(Protocol):
    """What leads to a process's host."""

    host: Host
    store_port: int | None
    """At which the host reaches the launcher's store, on its loopback address."""
    clock_offset_s: float | None
    """By how much the host's wall clock is ahead of ours."""

    def send(self, message: Message) -> None:
        """Send a message to the host's guard; lost without a word where the host is."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something that came from a process on a host."""

    remote: "Remote"
    kind: Literal["said", "stdout", "stderr", "ended", "lost"]
    """lost: the connection is gone, and the process with it."""
    message: Message
    """Of `said`; `{"text": line}` of output, `{"code": n}` at the end, `{"text": why}` if lost."""


@final
class Remote:
    """A process on a host."""

    def __init__(
        self, connection: HostChannel, name: str, inbox: "queue.SimpleQueue[Event]"
    ) -> None:
        self.connection = connection
        self.inbox = inbox
        self._name = name

    @property
    def host(self) -> Host:
        """Where it runs."""
        return self.connection.host

    def say(self, message: Message) -> None:
        """Send a message; lost without a word where the host is."""
        self.connection.send({"do": "say", "id": self._name, "message": message})

    def end(self, grace_s: float = 0.0) -> None:
        """Have it ended: SIGTERM, and SIGKILL to all it has started after `grace_s` seconds."""
        self.connection.send({"do": "end", "id": self._name, "grace_s": grace_s})

    def messages(self, timeout_s: float) -> Iterator[Message]:
        """Go through what it says, until it ends; needs an inbox of its own.

        Args:
            timeout_s: How long it may be silent.

        Raises:
            InfrastructureError: It is silent for longer, failed, or its host is lost.
        """
        printed: deque[str] = deque(maxlen=_TAIL_LINES)
        while True:
            try:
                event = self.inbox.get(timeout=timeout_s)
            except queue.Empty:
                raise InfrastructureError(
                    f"{self.host.name} has said nothing for {timeout_s:g} s"
                ) from None
            if event.kind == "said":
                yield event.message
            elif event.kind == "ended" and event.message["code"] == 0:
                return
            elif event.kind in ("ended", "lost"):
                printed.append(str(event.message.get("text", "")))
                text = "\n".join(filter(None, printed)) or f"code {event.message.get('code')}"
                raise InfrastructureError(f"{self.host.name}: {text}")
            else:
                printed.append(str(event.message["text"]))
