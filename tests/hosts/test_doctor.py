"""`paceline doctor --hosts` on real links: faults of hosts and links are found and named."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from paceline.errors import ExitCode
from tests.hosts.conftest import MakeRig
from tests.hosts.machine import Machine
from tests.hosts.network import _ip
from tests.hosts.rig import Rig
from tests.launch.waiting import patient, until
from tests.support.needs import PACKET_FILTER, need

pytestmark = [pytest.mark.hosts, pytest.mark.xdist_group("hosts")]

_LIMIT_S = 200.0
_RECIPE = """
from pathlib import Path
import torch
import paceline
from paceline.data.memory import TensorData

def build(*, classes: Path = Path("/media/classes")):
    labels = torch.tensor([int(word) for word in classes.read_text().split()])
    data = TensorData(
        name="own", images=torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8), labels=labels,
        class_names=("a", "b"), mean=(0.5,), std=(0.5,),
    )
    return paceline.Job(model=torch.nn.Linear(4, 2), train=data, validation=data)
"""
_BLOCK = """
table inet test {
  chain input {
    type filter hook input priority 0;
    tcp dport 50000-65535 tcp flags & (syn | ack) == syn reject with tcp reset
  }
}
"""
_NO_OFFLOAD = """
import ctypes, fcntl, socket, struct, sys
SIOCETHTOOL, SEGMENTATION, GENERIC, RECEIVE = 0x8946, 0x1F, 0x24, 0x2C
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
    for setting in (SEGMENTATION, GENERIC, RECEIVE):
        value = ctypes.create_string_buffer(struct.pack("II", setting, 0))
        asked = struct.pack("16sP", b"eth0", ctypes.addressof(value))
        fcntl.ioctl(any_socket, SIOCETHTOOL, asked)
"""


@dataclass(frozen=True)
class Told:
    """What the doctor has said."""

    code: int
    content: dict[str, list[dict[str, object]]]
    all_reduce: dict[str, object]

    @property
    def bad(self) -> dict[tuple[str, ...], str]:
        """Texts of findings that aren't ok, by state, what, and the hosts."""
        found = {}
        for entry in self.content["findings"]:
            hosts = entry["hosts"]
            assert isinstance(hosts, list)
            if entry["state"] != "ok" and entry["what"] not in ("load", "steal"):  # it may be busy
                found[str(entry["state"]), str(entry["what"]), *hosts] = str(entry["text"])
        return found

    @property
    def rates(self) -> dict[tuple[object, object], float | None]:
        """Bandwidth in bytes per second, by the ends of each way."""
        found = {}
        for link in self.content["links"]:
            rate = link["bandwidth_bytes_per_s"]
            assert rate is None or isinstance(rate, float)
            found[link["from"], link["to"]] = rate
        return found


def start(rig: Rig, words: Sequence[str], cwd: Path) -> "subprocess.Popen[str]":
    hosts = ",".join(f"{host.name}:1" for host in rig.hosts)
    command = [sys.executable, "-m", "paceline", "doctor", *words, "--json", "--hosts", hosts]
    config = ["--ssh-config", str(rig.ssh_config)]
    return rig.client.popen([*command, *config], cwd=cwd, stderr=subprocess.DEVNULL)


def finished(process: "subprocess.Popen[str]") -> Told:
    out, _ = process.communicate(timeout=patient(_LIMIT_S))
    content = json.loads(out)
    return Told(process.returncode, content, content["all_reduce"])


def wait_until_empty(rig: Rig) -> None:
    until(lambda: not any(rig.processes(n) for n in range(len(rig.hosts))))


def listening(machine: Machine) -> set[str]:
    shown = machine.run(["ss", "-Htln"]).stdout.splitlines()
    return {line.split()[3] for line in shown}


def test_faults_are_found_and_named(make_rig: MakeRig, tmp_path: Path) -> None:
    need(PACKET_FILTER)
    odd = tmp_path / "odd" / "numpy-1.0.0.dist-info"
    odd.mkdir(parents=True)
    (odd / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 1.0.0\n")
    (tmp_path / "own.py").write_text(_RECIPE)
    (tmp_path / "block.nft").write_text(_BLOCK)
    rig = make_rig(hosts=5, environments={0: {"PYTHONPATH": str(odd.parent)}})
    for n, host in enumerate(rig.hosts):
        labels = "0 1 1" if n == 3 else "0 1 0"
        assert host.run(["sh", "-c", f"echo {labels} > /media/classes"]).returncode == 0
    assert rig.host(1).run(["nft", "-f", tmp_path / "block.nft"]).returncode == 0
    rig.rate(2, "20mbit")
    _ip(rig.host(3), "link set eth0 mtu 1400")
    rig.kill(4)
    told = finished(start(rig, ["own.py:build", "--run-dir", "/media/runs/first"], tmp_path))
    bad = told.bad
    assert told.code == ExitCode.INFRASTRUCTURE
    assert "nothing listens at its ssh port" in bad["fault", "ssh", "h4"]
    assert "numpy 1.0.0, and " in bad["fault", "versions", "h0"]
    ports = bad["fault", "ports", "h0", "h2", "h3", "h1"]
    assert "can reach h1 at port" in ports
    assert "60999: Connection refused" in ports
    assert "links to all the others are slow" in bad["warning", "links", "h2"]
    assert "eth0 takes packets of 1400 bytes" in bad["warning", "MTU", "h3"]
    assert "only those of 1400 do" in bad["warning", "packets", "h0", "h1", "h2", "h3"]
    assert "TensorData own of 3 samples" in bad["fault", "data", "h3"]
    assert "have faults" in bad["warning", "all-reduce", "h0", "h1", "h2", "h3"]
    assert "Mbit/s: gradients of 100 MB" in bad["warning", "bandwidth", "h0", "h1", "h2", "h3"]
    assert {state for state, *_ in bad} == {"fault", "warning"}
    faults = sorted((what, hosts) for state, what, *hosts in bad if state == "fault")
    assert [what for what, _ in faults] == ["data", "ports", "ssh", "versions"]
    assert len(told.rates) == 12
    for ends, rate in told.rates.items():
        assert rate is not None
        assert (rate < 5e6) == ("h2" in ends), ends
    texts = [str(entry["text"]) for entry in told.content["findings"]]
    assert "/media is each host's own: each keeps its own snapshots" in texts
    wait_until_empty(rig)


def test_good_hosts_and_then_a_switch_that_swallows_large_packets(
    make_rig: MakeRig, tmp_path: Path
) -> None:
    rig = make_rig(hosts=2)
    rig.rate(0, "200mbit")
    rig.rate(1, "200mbit")
    process = start(rig, ["digits", "--run-dir", str(tmp_path / "run")], tmp_path)
    seen: dict[str, set[str]] = {host.name: listening(host) for host in rig.hosts}
    usual = {name: set(places) for name, places in seen.items()}
    while process.poll() is None:
        for host in rig.hosts:
            seen[host.name] |= listening(host)
    told = finished(process)
    assert list(told.bad) == [("warning", "bandwidth", "h0", "h1")]  # less than a gigabit
    assert told.code == ExitCode.DONE
    for host in rig.hosts:
        opened = seen[host.name] - usual[host.name]
        assert opened
        assert all(place.rpartition(":")[0] == host.address for place in opened)
    for rate in told.rates.values():
        assert rate == pytest.approx(0.957 * 200e6 / 8, rel=0.2)
    reduced = told.all_reduce
    assert (reduced["backend"], reduced["hosts"], reduced["is_right"]) == ("gloo", 2, True)
    assert isinstance(reduced["bus_bytes_per_s"], float)
    assert 5e6 < reduced["bus_bytes_per_s"] < 30e6
    texts = [str(entry["text"]) for entry in told.content["findings"]]
    assert f"{tmp_path} is shared: snapshots are written once" in texts
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    wait_until_empty(rig)

    for host in rig.hosts:
        assert host.run([sys.executable, "-I", "-S", "-c", _NO_OFFLOAD]).returncode == 0
    _ip(rig._switch, "link set p1 mtu 1300")
    _ip(rig.client, "link set eth0 mtu 1200")  # its own connections go on
    told = finished(start(rig, [], tmp_path))
    assert told.code == ExitCode.JOB
    assert "large ones don't" in told.bad["fault", "packets", "h0", "h1"]
    assert "only those of 1280 do" in told.bad["warning", "packets", "h0", "h1"]
    assert told.rates["h0", "h1"] is None
    wait_until_empty(rig)
