"""The rig is what it says: hosts with addresses, names and ssh, links that slow, break and heal."""

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.hosts.conftest import MakeRig
from tests.hosts.machine import Machine
from tests.hosts.rig import Rig
from tests.launch.waiting import alive, patient, until
from tests.support.needs import HOSTS, need

pytestmark = [pytest.mark.hosts, pytest.mark.xdist_group("hosts")]

ROOT = Path(__file__).resolve().parent.parent.parent
TALK = [sys.executable, "-I", "-S", str(Path(__file__).with_name("talk.py"))]


class Call:
    """A connection from one machine to another, on which bytes are echoed."""

    def __init__(self, caller: Machine, answerer: Machine) -> None:
        self._listener = answerer.popen([*TALK, "listen"])
        assert read_line(self._listener) == "listening"
        self._caller = caller.popen([*TALK, "call", answerer.name], stdin=subprocess.PIPE)
        assert read_line(self._caller) == "connected"

    def send(self, num_bytes: int = 1) -> str:
        assert self._caller.stdin is not None
        self._caller.stdin.write(f"{num_bytes}\n")
        self._caller.stdin.flush()
        return read_line(self._caller)

    def echo_s(self, num_bytes: int) -> float:
        word, _, time_s = self.send(num_bytes).partition(" ")
        assert word == "answered"
        return float(time_s)


def read_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def reaches(machine: Machine, other: str) -> bool:
    return machine.run(["ping", "-c", "1", "-W", "1", other]).returncode == 0


def test_each_host_is_a_machine_of_its_own(rig: Rig) -> None:
    others = [*rig.hosts, rig.client, rig.stranger]
    assert len({machine.address for machine in others}) == 5
    for machine in others:
        found = machine.run(["hostname"]).stdout.strip()
        assert found == machine.name
    shown = "ip -4 -o addr; echo $$; ls /run /media /dev/shm /sys/class/net; ps -A -o comm="
    text = rig.host(1).run(["sh", "-c", shown]).stdout
    assert f"inet {rig.host(1).address}/24" in text
    assert rig.host(0).address not in text
    assert "eth0" in text
    assert "pytest" not in text
    rig.host(0).run(["touch", "/run/mine", "/dev/shm/mine", "/media/mine"])
    found = rig.host(1).run(["ls", "/run", "/dev/shm", "/media"]).stdout
    assert "mine" not in found
    for name in ("h0", "h1", "h2", "client"):
        assert reaches(rig.stranger, name)
        assert reaches(rig.host(2), name)


def test_ssh_works_from_the_client_and_heeds_host_keys(rig: Rig) -> None:
    for n, host in enumerate(rig.hosts):
        done = rig.client.run([*rig.ssh(n), "hostname; echo $SSH_CONNECTION; exit 7"])
        name, connection = done.stdout.splitlines()
        assert (done.returncode, name) == (7, host.name)
        assert connection.split()[0] == rig.client.address
    command = [*rig.ssh(0), "true"]
    unknown = rig.client.run([*command[:3], "-o", "UserKnownHostsFile=/dev/null", *command[3:]])
    assert unknown.returncode == 255
    assert "Host key verification failed" in unknown.stderr
    known = (rig.ssh_config.parent / "known_hosts").read_text().splitlines()
    keys = {line.split()[2] for line in known}
    assert len(keys) == len(rig.hosts)


def test_links_are_slow_as_told(rig: Rig) -> None:
    call = Call(rig.host(0), rig.host(1))
    million = 1_000_000
    call.echo_s(million)
    rig.rate(1, "20mbit")
    assert call.echo_s(million) > 0.35  # 0.4 s, less what the bucket lets through at once
    rig.rate(1, None)
    rig.delay(30)
    assert call.echo_s(1) >= 0.06
    assert call.echo_s(million) >= 0.06
    rig.cut(1)
    assert not reaches(rig.host(0), "h1")
    assert reaches(rig.host(0), "h2")
    rig.heal(1)
    assert reaches(rig.host(0), "h1")
    rig.delay(0)
    assert "answered" in call.send()


def test_what_is_cut_heals_and_connections_go_on(rig: Rig) -> None:
    call = Call(rig.host(0), rig.host(1))
    rig.cut(1)
    assert call.send() == "silence"
    assert not reaches(rig.stranger, "h1")
    assert reaches(rig.stranger, "h0")
    rig.heal(1)
    until(lambda: "answered" in call.send())
    assert reaches(rig.stranger, "h1")


def test_a_host_without_power_says_nothing_and_forgets(rig: Rig) -> None:
    call = Call(rig.host(0), rig.host(1))
    running = {process.pid for process in rig.processes(1)}
    assert running
    rig.power_off(1)
    assert not any(alive(pid) for pid in running)
    assert rig.processes(1) == []
    assert call.send() == "silence"
    rig.power_on(1)
    assert rig.client.run([*rig.ssh(1), "hostname"]).stdout == "h1\n"
    until(lambda: call.send() == "closed")  # the new host knows nothing of the connection
    assert rig.processes(1) == []


def test_a_host_that_is_killed_tells_its_peers(rig: Rig) -> None:
    call = Call(rig.host(0), rig.host(1))
    sleeper = rig.client.popen([*rig.ssh(1), "setsid sleep 1000 & echo here; wait"])
    assert read_line(sleeper) == "here"
    rig.kill(1)
    assert rig.host(1).all_processes() == []
    assert call.send() == "closed"
    assert sleeper.wait(patient(30)) == 255
    assert reaches(rig.stranger, "h1")
    rig.power_on(1)
    assert rig.client.run([*rig.ssh(1), "hostname"]).stdout == "h1\n"


def test_a_frozen_host_is_silent_until_it_is_thawed(rig: Rig) -> None:
    call = Call(rig.host(0), rig.host(1))
    rig.freeze(1)
    assert call.send() == "silence"
    assert {p.status() for p in rig.host(1).all_processes()} == {psutil.STATUS_STOPPED}
    assert reaches(rig.stranger, "h1")
    rig.thaw(1)
    until(lambda: "answered" in call.send())


def test_a_command_ends_as_it_does_inside(make_rig: MakeRig) -> None:
    rig = make_rig(hosts=1, environments={0: {"MARK": "two words"}})
    host = rig.host(0)
    assert host.run(["sh", "-c", "exit 9"]).returncode == 9
    assert host.run(["printenv", "MARK"]).stdout == "two words\n"
    assert rig.client.run([*rig.ssh(0), "printenv MARK"]).stdout == "two words\n"
    trap = "trap 'echo caught; exit 3' TERM; echo ready; while :; do sleep 0.05; done"
    process = host.popen(["sh", "-c", trap])
    assert read_line(process) == "ready"
    process.terminate()
    assert (process.wait(patient(30)), read_line(process)) == (3, "caught")
    process = host.popen(["sleep", "1000"])
    until(lambda: [p.name() for p in rig.processes(0)] == ["sleep"])
    process.kill()
    assert process.wait(patient(30)) == -signal.SIGKILL
    until(lambda: rig.processes(0) == [])


def test_nothing_outlives_the_owner_of_a_rig(tmp_path: Path) -> None:
    need(HOSTS)
    owner = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        pids = [int(word) for word in read_line(owner).split()]
        assert len(pids) == 6  # h0 and its server, its sleeper, client, stranger, switch
        assert all(alive(pid) for pid in pids)
        owner.kill()
    until(lambda: not any(alive(pid) for pid in pids))


def test_two_rigs_do_not_meet(tmp_path: Path) -> None:
    need(HOSTS)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    interfaces = sorted(Path("/sys/class/net").iterdir())
    with Rig(tmp_path / "a", 2, {}) as one, Rig(tmp_path / "b", 1, {}) as other:
        assert one.host(0).address == other.host(0).address
        assert reaches(one.client, "h1")
        assert not reaches(other.client, one.host(1).address)
        assert sorted(Path("/sys/class/net").iterdir()) == interfaces


_OWNER = """
import signal, sys
from pathlib import Path
from tests.hosts.rig import Rig

with Rig(Path(sys.argv[1]), 1, {}) as rig:
    rig.host(0).popen(["sleep", "1000"])
    while not rig.processes(0):
        pass
    machines = [*rig._machines, rig._switch]
    pids = [p.pid for m in machines for p in m.all_processes()] + [m.init for m in machines]
    print(*pids, flush=True)
    signal.pause()
"""
