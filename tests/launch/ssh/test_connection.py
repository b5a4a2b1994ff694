import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from paceline import __version__
from paceline.errors import InfrastructureError
from paceline.launch.ssh import connection as ours
from paceline.launch.ssh import protocol
from paceline.launch.ssh.connection import Connection, connect, wait_for
from paceline.launch.ssh.hostfile import Host, parse_hosts
from paceline.launch.ssh.options import HostsOptions
from tests.launch.waiting import until

pytestmark = [pytest.mark.ranks, pytest.mark.usefixtures("near")]

SILENT = "time.sleep(600)"
ANSWER = f"""
print("Welcome to this machine!")
hello = json.loads(input())
tell({{"is": "ready", "nonce": hello["nonce"], "paceline": "{__version__}"}})
tell({{"is": "beat", "n": json.loads(input())["n"], "time_s": time.time()}})
"""

MakeHost = Callable[[str], Host]


@pytest.fixture
def acting(tmp_path: Path) -> MakeHost:
    """Give what makes a host on which a few lines of Python stand in for the guard."""

    def make(lines: str) -> Host:
        program = tmp_path / "guard"
        tell = "def tell(message):\n    print(json.dumps(message), flush=True)\n"
        program.write_text(f"#!{sys.executable} -S\nimport json, sys, time\n{tell}{lines}\n")
        program.chmod(0o755)
        return Host(name="acting", python=str(program))

    return make


def _children() -> set[psutil.Process]:
    """List this process's children: some of them belong to no test, such as the fork server."""
    return set(psutil.Process().children())


def test_hosts_are_connected_at_once_and_those_that_arent_there_are_named() -> None:
    with connect(parse_hosts("a,b,nowhere"), HostsOptions(), 4711) as connection_pool:
        assert [connection.host.name for connection in connection_pool.hosts] == ["a", "b"]
        assert [connection.store_port for connection in connection_pool.hosts] == [4711, 4711]
        for connection in connection_pool.hosts:
            assert connection.clock_offset_s is not None
        why = "nowhere: nothing listens at its ssh port. Is an ssh server running?"
        assert connection_pool.lost == {"nowhere": why}


@pytest.mark.parametrize("ahead_s", [3600, -86400])
def test_how_far_a_hosts_clock_is_ahead_is_known(acting: MakeHost, ahead_s: int) -> None:
    answer = ANSWER.replace("time.time()", f"time.time() + {ahead_s}")
    with connect([acting(answer + "sys.stdin.read()")], HostsOptions()) as connection_pool:
        # However slow this machine is, the answer came after the question: at most that far off.
        assert connection_pool.hosts[0].clock_offset_s == pytest.approx(ahead_s, abs=600)


def test_a_python_without_paceline_is_named(tmp_path: Path) -> None:
    hosts = [Host(name="a", python=f"{tmp_path}/python")]
    with connect(hosts, HostsOptions()) as connection_pool:
        assert connection_pool.hosts == []
        assert f"there is no {tmp_path}/python there" in connection_pool.lost["a"]


def test_a_process_that_fails_is_told_with_its_last_words(tmp_path: Path) -> None:
    with connect([Host(name="a", directory=str(tmp_path))], HostsOptions()) as connection_pool:
        remote = connection_pool.hosts[0].start("paceline.no_such_module", {})
        with pytest.raises(InfrastructureError, match=r"a: .*No module named"):
            list(remote.messages(30))


def test_a_lost_connection_ends_what_waits_for_it(tmp_path: Path) -> None:
    before = _children()
    with connect([Host(name="a", directory=str(tmp_path))], HostsOptions()) as connection_pool:
        connection = connection_pool.hosts[0]
        remote = connection.start("paceline.launch.hosts.attempt", {})
        (ssh,) = _children() - before
        until(lambda: bool(ssh.children()))
        ssh.kill()
        with pytest.raises(InfrastructureError, match=r"^a: "):
            list(remote.messages(30))
        until(lambda: connection.lost != "")
        assert connection_pool.hosts == []


def test_a_slow_host_costs_no_other_its_place(
    acting: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Connection(acting(SILENT), HostsOptions(), None)
    good = Connection(Host(name="a"), HostsOptions(), 4711)
    try:
        until(lambda: good.is_ready)
        over = threading.Event()
        over.set()
        assert not slow.wait(over=over)  # at once
        assert not slow.lost
        monkeypatch.setattr(ours, "CONNECT_S", 0.1)
        wait_for([slow, good])
        assert slow.lost.startswith("acting: no answer in ")
        assert good.is_ready
    finally:
        slow.close()
        good.close()


def test_what_comes_in_a_long_line_is_a_sign_of_life(
    acting: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "HEARTBEAT_S", 0.1)
    monkeypatch.setattr(ours, "LEASE_S", 1.5)
    slowly = """
for _ in range(60):
    print(end=" ", flush=True)
    time.sleep(0.05)
tell({"is": "ended", "id": "1", "code": 0})
sys.stdin.read()
"""
    with connect([acting(ANSWER + slowly)], HostsOptions()) as reached:
        assert list(reached.hosts[0].start("paceline.some_module", {}).messages(30)) == []


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ("print('x' * 300_000, flush=True)", "a message is longer than 100000 bytes"),
        ("tell({'is': 'beat', 'n': 'x'}); sys.stdin.read()", "nobody understands: ValueError"),
        ("sys.exit(3)", "ended with code 3: it said nothing"),
        ("print('the disk burns', file=sys.stderr); sys.exit(3)", "code 3: the disk burns"),
    ],
)
def test_a_host_is_lost_for_the_reason_that_is_told(
    acting: MakeHost, monkeypatch: pytest.MonkeyPatch, lines: str, why: str
) -> None:
    monkeypatch.setattr(protocol, "LONGEST_BYTES", 100_000)
    with connect([acting(ANSWER + lines)], HostsOptions()) as reached:
        until(lambda: bool(reached.lost))
        assert why in reached.lost["acting"]


def test_a_port_that_isnt_forwarded_and_another_version_are_named(acting: MakeHost) -> None:
    refusal = "print('Warning: remote port forwarding failed for listen port 0', file=sys.stderr)"
    with connect([acting(f"{refusal}; {SILENT}")], HostsOptions(), 4711) as reached:
        assert "AllowTcpForwarding" in reached.lost["acting"]
    other = acting(ANSWER.replace(__version__, "0.0.0") + "sys.stdin.read()")
    with connect([other], HostsOptions()) as reached:
        assert "Paceline 0.0.0 is installed there" in reached.lost["acting"]
    connection = Connection(other, HostsOptions(), None, any_version=True)
    try:
        assert connection.wait()
    finally:
        connection.close()


def test_a_lost_connection_holds_nothing_and_can_be_closed_again() -> None:
    before, descriptors = _children(), psutil.Process().num_fds()
    connection = Connection(Host(name="holding"), HostsOptions(), None)
    assert connection.wait()
    remote = connection.start("paceline.no_such_module", {})
    (ssh,) = _children() - before
    ssh.kill()
    until(lambda: not any(t.name == "paceline-holding" for t in threading.enumerate()))
    assert psutil.Process().num_fds() == descriptors
    connection.close()
    connection.close()
    with pytest.raises(InfrastructureError):
        list(remote.messages(10))


def test_a_host_that_reads_nothing_is_closed_all_the_same(
    acting: MakeHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ours, "_WRITE_BACKLOG", 2)
    monkeypatch.setattr(ours, "_END_S", 0.5)
    connection = Connection(acting(SILENT), HostsOptions(), None)
    for _ in range(100):
        connection.send({"do": "say", "text": "x" * 100_000})
    closing = threading.Thread(target=connection.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
