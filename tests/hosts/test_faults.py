"""Faults during trainings over hosts: each is seen to happen, and the weights come out the same.

The oracle is one undisturbed process: with --shards the final weights have the same bits.
"""

import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.hosts.byhand import PORT, ByHand
from tests.hosts.clocks import shifted
from tests.hosts.conftest import MakeRig
from tests.hosts.machine import Machine
from tests.hosts.overhosts import OverHosts, worker_on
from tests.launch.waiting import until
from tests.support.needs import COMPILER, need

pytestmark = [pytest.mark.hosts, pytest.mark.xdist_group("hosts")]

LEFT_BEHIND_S = 15.0
"""No process may be left on a host for longer than this after its launcher is gone."""


def test_the_first_host_and_a_worker_are_lost_and_clocks_differ(
    make_rig: MakeRig, tmp_path: Path, undisturbed: object
) -> None:
    need(COMPILER)
    rig = make_rig(hosts=3, environments=shifted(tmp_path, {1: 3600, 2: -30}))
    assert clock_ahead_s(rig.host(1)) > 3000
    assert clock_ahead_s(rig.host(2)) < -20
    training = OverHosts(rig, tmp_path / "over")
    training.reach_gate(0)
    assert "h1: its clock is 3600 s ahead" in training.err

    rig.power_off(0)  # rank 0's; nobody is told
    training.reach_gate(1)
    assert "rank 0 (h0): the host is lost" in training.err
    assert worker_on(rig.host(1)).is_running()
    rig.power_on(0)
    until(lambda: is_guarded(rig.host(0)))  # the launcher has found it again

    victim = worker_on(rig.host(2))
    victim.kill()
    training.reach_gate(2)
    assert not victim.is_running()
    assert "rank 1 (h2, step" in training.err
    assert "killed by SIGKILL" in training.err
    assert "h0 is back" in training.err
    assert worker_on(rig.host(0)).is_running()

    training.launcher.send_signal(signal.SIGINT)
    training.open_all()
    assert training.finish() == 75, training.err
    assert "paceline resume" in training.out
    assert all(rig.processes(n) == [] for n in range(3))
    resume = [sys.executable, "-m", "paceline", "resume", str(training.run_dir), "--workers", "1"]
    resumed = rig.client.run(resume)  # here, on one worker
    assert resumed.returncode == 0, resumed.stderr
    assert training.sha256() == undisturbed


def test_a_link_breaks_and_a_worker_hangs(
    make_rig: MakeRig, tmp_path: Path, undisturbed: object
) -> None:
    rig = make_rig(hosts=2)
    training = OverHosts(rig, tmp_path / "over", hang_after_s=15)
    training.reach_gate(0)
    rig.cut(1)  # for a moment
    training.open_gate(0)
    assert rig.host(0).run(["ping", "-c", "1", "-W", "1", "h1"]).returncode != 0
    rig.heal(1)
    training.reach_gate(0, 2)
    assert "start again" not in training.err

    hung = worker_on(rig.host(1))
    hung.suspend()
    training.open_gate(0, 2)
    training.reach_gate(1)
    assert not hung.is_running()
    assert "Missing is rank 1 on h1" in training.err
    assert "stopped by a signal" in training.err

    rig.cut(0)  # for good
    training.open_gate(1)
    until(lambda: rig.processes(0) == [], LEFT_BEHIND_S)  # by themselves: nobody reaches them
    training.reach_gate(2)
    assert "rank 0 (h0): the host is lost" in training.err
    training.open_all()
    assert training.finish() == 0, training.err
    assert training.sha256() == undisturbed


def test_two_trainings_at_once_and_a_launcher_that_is_killed(
    make_rig: MakeRig, tmp_path: Path, undisturbed: object
) -> None:
    rig = make_rig(hosts=2)
    training = OverHosts(rig, tmp_path / "over")
    training.reach_gate(0)
    other = OverHosts(rig, tmp_path / "other")
    other.open_all()
    assert other.finish() == 0, other.err
    assert other.sha256() == undisturbed

    ours = {process.pid for process in rig.processes(1)}
    ssh_to(rig.client, "h1").kill()
    until(lambda: ours.isdisjoint(p.pid for p in rig.processes(1)), LEFT_BEHIND_S)
    training.reach_gate(1)
    assert "rank 1 (h1): the host is lost" in training.err
    assert "h1 is back" in training.err

    rig.freeze(0)
    training.launcher.kill()
    until(lambda: rig.processes(1) == [], LEFT_BEHIND_S)
    assert {p.status() for p in rig.processes(0)} == {psutil.STATUS_STOPPED}
    rig.thaw(0)
    until(lambda: rig.processes(0) == [], LEFT_BEHIND_S)
    until(lambda: rig.client.processes() == [], LEFT_BEHIND_S)


def test_a_port_that_is_taken_is_named(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(hosts=2)
    address = rig.host(0).address
    take = f"import socket; taken = socket.create_server(('{address}', {PORT})); print('taken')"
    squatter = rig.host(0).popen(
        [sys.executable, "-u", "-c", f"{take}; import time; time.sleep(999)"]
    )
    assert squatter.stdout is not None
    assert squatter.stdout.readline() == "taken\n"
    training = ByHand(rig, tmp_path / "run", "--timeout-s", "10")
    assert training.codes() == [70, 70]
    assert f"can't listen at tcp://{address}:{PORT}: Address already in use" in training.said(0)
    # What it reached accepts and says nothing.
    assert f"rank 1 on h1 did not reach rank 0 at tcp://{address}:{PORT}" in training.said(1)
    assert not training.run_dir.exists()


def clock_ahead_s(host: Machine) -> float:
    return float(host.run(["date", "+%s"]).stdout) - time.time()


def is_guarded(host: Machine) -> bool:
    """Whether a launcher's guard on a host has begun to answer: it has a thread for that."""
    return any(process.num_threads() > 1 for process in host.processes())


def ssh_to(client: Machine, name: str) -> psutil.Process:
    (found,) = (p for p in client.processes() if p.name() == "ssh" and name in p.cmdline())
    return found
