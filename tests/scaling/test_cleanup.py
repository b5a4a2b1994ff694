"""What measurements leave on hosts is removed there, and nothing else."""

import os
from pathlib import Path

import pytest

from paceline.launch.ssh.hostfile import Host
from paceline.launch.ssh.options import HostsOptions
from paceline.scaling.cleanup import sweep, sweep_command
from tests.support.nearssh import near_ssh

HERE = Path("/work/my project")


@pytest.mark.parametrize(
    ("directory", "sync_code", "run_dir", "removed"),
    [
        (None, False, "/work/my project/runs/x", "'/work/my project/runs/x/snapshots'"),
        ("/data", False, "/work/my project/runs/x", "/data/runs/x/snapshots"),
        ("~/it's", False, "/work/my project/x", "\"$HOME\"'/it'\"'\"'s/x/snapshots'"),
        (None, True, "/work/my project/x", "\"$HOME\"'/paceline/my project/x/snapshots'"),
        ("/data", False, "/elsewhere/x", "/elsewhere/x/snapshots"),
    ],
)
def test_where_the_snapshots_are(
    directory: str | None, sync_code: bool, run_dir: str, removed: str
) -> None:
    host, options = Host(name="a", directory=directory), HostsOptions(sync_code=sync_code)
    command = sweep_command(host, options, Path(run_dir), HERE)
    assert command[-3:] == ["--", "a", f"rm -rf -- {removed}"]


def test_they_are_gone_and_a_host_that_fails_is_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{near_ssh(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}")
    run = tmp_path / "far" / "runs" / "x"
    (run / "snapshots" / "step-1").mkdir(parents=True)
    hosts = [Host(name="a", directory=str(tmp_path / "far")), Host(name="nowhere")]
    sweep(hosts, HostsOptions(), tmp_path / "here" / "runs" / "x", tmp_path / "here")
    assert list(run.iterdir()) == []
