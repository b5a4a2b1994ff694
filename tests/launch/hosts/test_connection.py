from pathlib import Path

import psutil
import pytest

from paceline.errors import InfrastructureError
from paceline.launch.hosts.connection import connect
from paceline.launch.hosts.hostfile import Host, parse_hosts
from paceline.launch.hosts.options import HostsOptions
from tests.launch.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("near")]


def test_hosts_are_connected_at_once_and_those_that_arent_there_are_named() -> None:
    said: list[str] = []
    with connect(parse_hosts("a,b,nowhere"), HostsOptions(), 4711, said.append) as fleet:
        assert [connection.host.name for connection in fleet.hosts] == ["a", "b"]
        assert [connection.store_port for connection in fleet.hosts] == [4711, 4711]
        for connection in fleet.hosts:
            assert connection.clock_offset_s == pytest.approx(0.0, abs=5.0)
        assert list(fleet.lost) == ["nowhere"]
    assert said == ["nowhere: nothing listens at its ssh port. Is an ssh server running?"]


def test_a_python_without_paceline_is_named(tmp_path: Path) -> None:
    hosts = [Host(name="a", python=f"{tmp_path}/python")]
    with connect(hosts, HostsOptions()) as fleet:
        assert fleet.hosts == []
        assert f"there is no {tmp_path}/python there" in fleet.lost["a"]


def test_a_process_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with connect([Host(name="a", directory=str(tmp_path))], HostsOptions()) as fleet:
        remote = fleet.hosts[0].start("paceline.no_such_module", {})
        with pytest.raises(InfrastructureError, match=r"a: .*No module named"):
            list(remote.messages(30))


def test_a_lost_connection_ends_what_waits_for_it(tmp_path: Path) -> None:
    with connect([Host(name="a", directory=str(tmp_path))], HostsOptions()) as fleet:
        connection = fleet.hosts[0]
        remote = connection.start("paceline.launch.hosts.attempt", {})
        me = psutil.Process()
        until(lambda: len(me.children(recursive=True)) >= 2)
        for child in me.children():  # ssh
            child.kill()
        with pytest.raises(InfrastructureError, match=r"^a: "):
            list(remote.messages(30))
        until(lambda: connection.lost != "")
        assert fleet.hosts == []
