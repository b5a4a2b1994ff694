"""How an attempt on several hosts is brought to its end."""

import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import pytest

from paceline.launch.processes import PEERS_S
from paceline.launch.ssh.participants import GracefulShutdown, Participant, StopState


class Host:
    """A host that never ends by itself; remembers what it is sent."""

    def __init__(self) -> None:
        self.sent: list[Mapping[str, object]] = []
        self.ended = False
        self.remote = SimpleNamespace(send=self.sent.append, end=lambda: None)


def test_a_request_to_stop_after_a_failure_does_not_delay_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    host, shutdown, stop = Host(), GracefulShutdown(), StopState()
    members = [cast(Participant, host)]
    shutdown.advance(members, stop, failed=True)
    assert host.sent == []
    stop.request_stop(now_s, 60.0)
    now_s += PEERS_S + 0.1
    shutdown.advance(members, stop, failed=True)
    assert host.sent == [{"kill": True}]
