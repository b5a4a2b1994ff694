"""How an attempt on several hosts is brought to its end."""

import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

import pytest

from paceline.launch.processes import PEERS_S
from paceline.launch.restart_policy import StopGrace, stopping_line
from paceline.launch.ssh.participants import GracefulShutdown, Participant, StopState
from tests.launch.watchdog.states import IN_STEP, changed


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
    stop.request_stop(now_s, StopGrace(least_s=60.0, most_s=60.0))
    now_s += PEERS_S + 0.1
    shutdown.advance(members, stop, failed=True)
    assert host.sent == [{"kill": True}]


def test_hosts_whose_workers_need_longer_to_stop_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, said = 100.0, list[str]()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    host, shutdown, stop = Host(), GracefulShutdown(), StopState(said.append)
    members, workers = [cast(Participant, host)], [changed(IN_STEP, lap_s=14.0)]
    stop.request_stop(now_s, StopGrace(least_s=3.5, most_s=60.0))
    shutdown.advance(members, stop, failed=False, workers=workers)
    assert said == [stopping_line(30.0)]
    # When that is over, one writes its snapshot.
    now_s += 30.0 + PEERS_S
    workers = [changed(IN_STEP, operation="snapshot")]
    shutdown.advance(members, stop, failed=False, workers=workers)
    assert said[1:] == [stopping_line(30.0, is_late=True)]
    assert host.sent == [{"stop": True}]
    now_s += 30.0
    shutdown.advance(members, stop, failed=False, workers=workers)
    assert host.sent == [{"stop": True}, {"kill": True}]
