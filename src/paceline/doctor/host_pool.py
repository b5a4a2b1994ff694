"""The hosts under examination: questioned at once, and left out once they don't answer any more."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from paceline.doctor.check_result import CheckResult, fault
from paceline.errors import InfrastructureError
from paceline.launch.ssh.protocol import Message

Answers = dict[str, Mapping[str, object]]


class Probe(Protocol):
    """A probe on a host; a `RemoteProcess`."""

    def send(self, message: Message) -> None:
        """Send a message; dropped silently where the probe is gone."""

    def messages(self, timeout_s: float) -> Iterator[Message]:
        """Iterate over its messages; InfrastructureError where it is silent for longer, or gone."""


@dataclass(kw_only=True)
class PooledHost:
    """A host under examination."""

    name: str
    """As the user has named it."""
    probe: Probe
    slots: int | None = None
    """Workers it is to have; None: one for each GPU, or as many as Paceline chooses."""
    address: str | None = None
    """At which the others reach it, where the hostfile says so."""
    lost: str = ""
    """Why it can't be examined any further; empty while it can."""


@final
class HostPool:
    """All hosts under examination."""

    def __init__(self, hosts: Sequence[PooledHost]) -> None:
        self._hosts = list(hosts)
        self._questions = 0

    @property
    def hosts(self) -> list[PooledHost]:
        """Those that still answer, in the order in which they were named."""
        return [host for host in self._hosts if not host.lost]

    @property
    def names(self) -> list[str]:
        """Names of those that still answer."""
        return [host.name for host in self.hosts]

    @property
    def losses(self) -> list[CheckResult]:
        """Those that have ceased to answer."""
        return [
            fault(host.name, "examination", f"it went silent: {host.lost}")
            for host in self._hosts
            if host.lost
        ]

    def query(
        self, questions: Mapping[str, Mapping[str, object]], timeout_s: float
    ) -> tuple[Answers, dict[str, str]]:
        """Ask hosts at once, and wait for all.

        Args:
            questions: By the host's name; of hosts that are lost none is questioned.
            timeout_s: A host that hasn't answered by then is lost.

        Returns:
            Answers, and why there is none, by host.
        """
        # Send to all before waiting for any. The number tells late answers to earlier ones apart.
        questioned = [host for host in self.hosts if host.name in questions]
        self._questions += 1
        for host in questioned:
            host.probe.send({"number": self._questions, **questions[host.name]})
        # Collect the answers; all hosts share one deadline.
        answers: Answers = {}
        problems: dict[str, str] = {}
        deadline_s = time.monotonic() + timeout_s
        for host in questioned:
            try:
                reply = _answer(host.probe, self._questions, deadline_s)
            except InfrastructureError as error:
                host.lost = problems[host.name] = str(error)
                continue
            answer = reply.get("answer")
            if isinstance(answer, Mapping):
                answers[host.name] = answer
            else:
                problems[host.name] = str(reply.get("problem", "it didn't understand"))
        return answers, problems

    def query_all(
        self, question: Mapping[str, object], timeout_s: float
    ) -> tuple[Answers, dict[str, str]]:
        """Ask all hosts the same question at once, and wait for all, like `query`."""
        return self.query(dict.fromkeys(self.names, question), timeout_s)


def _answer(probe: Probe, number: int, deadline_s: float) -> Message:
    while True:
        reply = next(probe.messages(max(0.05, deadline_s - time.monotonic())), None)
        if reply is None:
            raise InfrastructureError("its probe has ended without a word")
        if reply.get("number") == number:
            return reply
