"""What a node runs at its first start, run here: with its files elsewhere, and no systemd."""

import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from paceline.provision.aws.template import read_script
from tests.launch.waiting import patient
from tests.support.needs import SYSTEMD, need

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the nodes run Linux: GNU date")


def run_script(root: Path, *, systemctl: str = "exit 0") -> str:
    """Run it. Returns the commands that it ran, a line each."""
    for folder in ("etc/systemd/system", "etc/sysctl.d", "bin"):
        (root / folder).mkdir(parents=True)
    for name, body in (("systemctl", systemctl), ("sysctl", "exit 0"), ("shutdown", "exit 0")):
        program = root / "bin" / name
        program.write_text(f'#!/bin/sh\necho {name} "$@" >>{root}/ran\n{body}\n')
        program.chmod(0o755)
    values = {"StopAfterMinutes": "90", "FirstPort": "20000", "LastPort": "29999"}
    script = re.sub(r"\$\{(\w+)\}", lambda found: values[found[1]], read_script())
    environment = {"PATH": f"{root}/bin:{os.environ['PATH']}", "PACELINE_ROOT": str(root)}
    subprocess.run(["bash", "-c", script], env=environment, check=True, timeout=patient(30))
    return (root / "ran").read_text()


def test_the_node_stops_itself_at_a_point_in_time(tmp_path: Path) -> None:
    before = datetime.now(UTC)
    ran = run_script(tmp_path)
    timer = (tmp_path / "etc/systemd/system/paceline-stop.timer").read_text()
    found = re.search(r"OnCalendar=(.*) UTC", timer)
    assert found is not None
    end = datetime.strptime(found[1], "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    assert timedelta(minutes=89, seconds=58) < end - before < timedelta(minutes=92)
    assert "Persistent=true" in timer
    assert "systemctl enable --now paceline-stop.timer" in ran
    assert "shutdown" not in ran


def test_without_a_timer_it_is_shut_down_all_the_same(tmp_path: Path) -> None:
    assert "shutdown -h +90" in run_script(tmp_path, systemctl="exit 1")


def test_the_kernel_gives_the_ports_that_are_let_through(tmp_path: Path) -> None:
    ran = run_script(tmp_path)
    settings = tmp_path / "etc/sysctl.d/90-paceline.conf"
    assert settings.read_text() == "net.ipv4.ip_local_port_range = 20000 29999\n"
    assert f"sysctl -p {settings}" in ran


@pytest.mark.slow
def test_systemd_takes_the_point_in_time(tmp_path: Path) -> None:
    need(SYSTEMD)
    run_script(tmp_path)
    timer = (tmp_path / "etc/systemd/system/paceline-stop.timer").read_text()
    (when,) = re.findall(r"OnCalendar=(.*)", timer)
    done = subprocess.run(
        ["systemd-analyze", "calendar", when], capture_output=True, text=True, timeout=patient(30)
    )
    assert done.returncode == 0, done.stderr
    assert "Next elapse: " in done.stdout
    assert "never" not in done.stdout
