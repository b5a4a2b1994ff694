"""This machine is examined in a process apart, which ends with the examination."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

from paceline.doctor.diagnosis import DiagnosisRequest
from paceline.doctor.host_pool import HostPool, PooledHost
from paceline.doctor.probes.handshake import Tokens
from paceline.doctor.runner import TrainingPlace, examine_here, examine_hosts
from paceline.errors import ExitCode
from paceline.launch.ssh.connection import connect
from paceline.launch.ssh.hostfile import Host
from paceline.launch.ssh.options import HostsOptions
from paceline.launch.ssh.ssh import AGENT_HERE
from tests.launch.waiting import alive, patient, until

DIGITS = {"reference": "paceline.recipes.digits:digits", "arguments": {}, "seed": 0}


@contextmanager
def probes_here(*names: str) -> Iterator[tuple[HostPool, Tokens]]:
    """Have a probe for each of these names on this machine."""
    hosts, tokens = [Host(name=name, directory=".") for name in names], Tokens.made()
    with connect(hosts, HostsOptions(), here=True) as fleet:
        probes = [c.start("paceline.doctor.probe", {"tokens": asdict(tokens)}) for c in fleet.all]
        pool = [PooledHost(name=n, probe=p) for n, p in zip(names, probes, strict=True)]
        yield HostPool(pool), tokens


def pid_of(pool: HostPool) -> int:
    """Give the process of the first host's probe, once it answers: its agent's child."""
    assert pool.query({pool.names[0]: {"ask": "close"}}, 60)[1] == {}
    agent = next(p for p in psutil.Process().children() if AGENT_HERE[-1] in p.cmdline())
    return agent.children()[0].pid


@pytest.mark.slow
def test_this_machine(tmp_path: Path) -> None:
    said: list[str] = []
    place = TrainingPlace(directory=str(tmp_path), runs="runs")
    found = examine_here(DiagnosisRequest(on_gpus=False, recipe=DIGITS), place, 1, said.append)
    (host,) = found.hosts
    facts = found.facts[host]
    assert facts.unknown == {}
    assert facts.disk.directory == str(tmp_path)
    assert {"Paceline", "torch", "Python", "numpy"} <= facts.software.versions.keys()
    named = {finding.what for finding in found.findings}
    assert {"versions", "memory", "cores", "disk", "GPUs", "data", "/dev/shm"} <= named
    assert not {"ports", "address", "name"} & named
    assert [f.state for f in found.findings if f.what == "data"] == ["ok", "ok"]
    assert said == ["looking at every host", "looking at the data"]
    assert list(tmp_path.iterdir()) == []


def test_a_probe_ends_with_what_started_it() -> None:
    """It is ended by its agent: its starter has no time to do it."""
    code = (
        "import os, signal\n"
        "from tests.doctor.test_runner import probes_here, pid_of\n"
        "with probes_here('a') as (pool, _):\n"
        "    print(pid_of(pool), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
    pid = int(done.stdout)
    until(lambda: not alive(pid))


@pytest.mark.slow
def test_questions_that_a_probe_does_not_know_are_problems() -> None:
    with probes_here("a") as (pool, _):
        answers, problems = pool.query_all({"ask": "fly"}, 60)
        assert answers == {}
        assert "fly" in problems["a"]
        answers, problems = pool.query_all({"ask": "names", "names": ["localhost"]}, 60)
        assert answers == {"a": {"localhost": "127.0.0.1"}}


def test_a_probe_that_dies_is_told_of() -> None:
    with probes_here("a") as (pool, _):
        os.kill(pid_of(pool), signal.SIGKILL)
        assert "code -9" in pool.query_all({"ask": "facts"}, 60)[1]["a"]
        assert [(f.hosts, f.state) for f in pool.losses] == [(("a",), "fault")]


@pytest.mark.slow
def test_the_tokens_are_in_no_command_line_and_no_environment() -> None:
    with probes_here("a") as (pool, tokens):
        place = Path(f"/proc/{pid_of(pool)}")
        shown = (place / "cmdline").read_bytes() + (place / "environ").read_bytes()
        assert tokens.asks.encode() not in shown
        assert tokens.answers.encode() not in shown
        assert json.dumps(asdict(tokens)).encode() not in shown


@pytest.mark.slow
def test_an_all_reduce_of_two_probes() -> None:
    with probes_here("a", "b") as (pool, _):
        store = {"ask": "store", "address": "127.0.0.1", "timeout_s": 60}
        kept, _ = pool.query({"a": store}, 60)
        port = kept["a"]["port"]
        listening = psutil.Process(pid_of(pool)).net_connections("inet")
        assert {c.laddr for c in listening if c.status == "LISTEN"} == {("127.0.0.1", port)}
        plan = {"ask": "all_reduce", "world_size": 2, "master": "127.0.0.1", "port": port}
        plan |= {"interface": "lo", "size_bytes": 1 << 20, "timeout_s": 60}
        asked = {name: {**plan, "rank": rank} for rank, name in enumerate(pool.names)}
        answers, problems = pool.query(asked, 120)
        assert problems == {}
        for answer in answers.values():
            assert answer["is_right"] is True
            assert 0 < float(str(answer["seconds"])) < 60


_SSH = """#!/bin/sh
for word; do host=$command; command=$word; done
if [ "$host" = down ]; then
  echo "ssh: connect to host down port 22: Connection refused" >&2
  exit 255
fi
exec sh -c "$command"
"""


@pytest.mark.slow
def test_a_host_that_cannot_be_reached_and_one_that_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text(_SSH)
    (tmp_path / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts = (Host(name="up", slots=1), Host(name="down", slots=1, directory="/"))
    place = TrainingPlace(directory=str(tmp_path / "gone"), runs="runs")
    found = examine_hosts(hosts, HostsOptions(), DiagnosisRequest(), place, lambda text: None)
    assert found.hosts == ("up", "down")
    assert found.unreachable == ("down",)
    assert found.exit_code == ExitCode.INFRASTRUCTURE
    assert list(found.facts) == ["up"]
    told = {(f.hosts, f.what): f for f in found.findings if f.state != "ok"}
    ssh = told[("down",), "ssh"]
    assert ssh.state == "fault"
    assert ssh.text.startswith("nothing listens at its ssh port")
    directory = told[("up",), "directory"]
    assert directory.state == "warning"
    assert str(tmp_path / "gone") in directory.text
