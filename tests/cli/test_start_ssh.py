"""Training over "hosts" that are all this machine; `tests/hosts` has real ones."""

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from paceline.launch.ssh.options import HostsOptions
from tests.cli.conftest import Paceline, summary, wait_for_step, wait_until
from tests.support.nearssh import near_ssh

pytestmark = pytest.mark.ranks

_TRAIN = ("train", "digits", "--epochs", "2", "--shards", "4")


@pytest.fixture
def near(tmp_path: Path) -> Mapping[str, str]:
    """Variables under which every host is this machine."""
    return {"PATH": f"{near_ssh(tmp_path / 'bin')}{os.pathsep}{os.environ['PATH']}"}


def _hostfile(directory: Path, **slots: int) -> Path:
    """Write a hostfile of hosts that have nothing in common but the machine."""
    lines = []
    for name, workers in slots.items():
        (directory / name).mkdir()
        lines.append(f"{name} slots={workers} dir={directory / name}")
    path = directory / "hosts.txt"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
def test_unequal_hosts_train_the_same_and_their_files_come_back(
    paceline: Paceline, near: Mapping[str, str], tmp_path: Path
) -> None:
    hostfile = _hostfile(tmp_path, first=1, second=2)
    alone = paceline.run(*_TRAIN, "--workers", "1", "--run-dir", "alone")
    assert alone.code == 0, alone.err
    done = paceline.run(*_TRAIN, "--hostfile", hostfile, "--run-dir", "runs/far", env=near)
    assert done.code == 0, done.err
    run = paceline.directory / "runs" / "far"
    assert summary(run)["weights_sha256"] == summary(paceline.directory / "alone")["weights_sha256"]
    assert (summary(run)["world_size"], summary(run)["nodes"]) == (3, 2)
    assert "first  | Paceline" in done.out
    assert sorted(path.name for path in (run / "logs").glob("rank-*.log")) == [
        "rank-0.log",
        "rank-1.log",
        "rank-2.log",
    ]
    assert len((run / "metrics.csv").read_text().splitlines()) == 3
    assert (run / "report.html").exists()
    assert (run / "profile.json").exists()
    assert list((run / "snapshots").iterdir()) == []  # they stay on the hosts
    for name in ("first", "second"):
        assert any((tmp_path / name / "runs" / "far" / "snapshots").glob("step-*"))


_RECIPE = """
from pathlib import Path
import paceline
from paceline.recipes.digits import digits


@paceline.recipe(epochs=2, batch_per_worker=8, snapshot_every_steps=5, lr=0.05)
def own(*, notes: Path | None = None, data: Path = Path("data")) -> paceline.Job:
    assert notes is None
    assert (data / "here").exists()
    return digits()
"""


@pytest.mark.slow
def test_a_recipe_of_ones_own_goes_on_where_a_host_was_lost(
    paceline: Paceline, near: Mapping[str, str], tmp_path: Path
) -> None:
    """Directories are others, the batch is said per worker, and one host doesn't come back."""
    hostfile = _hostfile(tmp_path, first=1, second=1)
    for place in (paceline.directory, tmp_path / "first", tmp_path / "second"):
        (place / "own.py").write_text(_RECIPE)
        (place / "data").mkdir()
        (place / "data" / "here").touch()
    process = paceline.start(
        *("train", "own.py:own", "--hostfile", hostfile, "--run-dir", "out/r"), env=near
    )
    wait_for_step(tmp_path / "first" / "out" / "r", 5)
    hostfile.write_text(hostfile.read_text().splitlines()[0])
    _lose_last_host(process.pid)
    done = paceline.finish(process)
    assert done.code == 0, done.err
    run = paceline.directory / "out" / "r"
    assert (summary(run)["nodes"], summary(run)["global_batch"]) == (1, 16)
    told = json.loads((run / "run.json").read_text())
    assert told["reference"] == f"{paceline.directory}/own.py:own"
    assert told["recipe_arguments"] == {"notes": None, "data": f"{paceline.directory}/data"}

    more = ("resume", run, "--epochs", "3", "--allow-change", "epochs", "--hostfile", hostfile)
    resumed = paceline.run(*more, env=near)
    assert resumed.code == 0, resumed.err
    assert summary(run)["epochs"] == 3


@pytest.mark.slow
def test_snapshots_that_hosts_dont_have_are_not_forgotten(
    paceline: Paceline, near: Mapping[str, str], tmp_path: Path
) -> None:
    here = paceline.run("train", "digits", "--epochs", "1", "--run-dir", "r")
    assert here.code == 0, here.err
    hostfile = _hostfile(tmp_path, first=1)
    more = ("--epochs", "2", "--allow-change", "epochs", "--hostfile", hostfile)
    refused = paceline.run("resume", "r", *more, env=near)
    assert refused.code == 2
    assert "the newest snapshot here is of step 23, and the hosts have none" in refused.err


@pytest.mark.slow
def test_hosts_that_cant_train_together_are_named_and_nothing_is_left(
    paceline: Paceline, near: Mapping[str, str], tmp_path: Path
) -> None:
    hostfile = _hostfile(tmp_path, first=1, second=1)
    recipe = "import paceline\n\n\ndef other(size: int = 2) -> paceline.Job: ...\n"
    for name, text in (("first", recipe), ("second", recipe + "# newer\n")):
        (tmp_path / name / "own.py").write_text(text)
    (paceline.directory / "own.py").write_text(recipe)
    differing = paceline.run(
        *("train", "own.py:other", "--hostfile", hostfile, "--run-dir", "r"), env=near
    )
    assert differing.code == 65
    assert "second has own.py with SHA-256" in differing.err
    assert "--sync-code" in differing.err
    assert not (paceline.directory / "r").exists()

    away = paceline.run("train", "digits", "--hosts", "first,nowhere", "--run-dir", "r", env=near)
    assert away.code == 70
    assert "nowhere: nothing listens at its ssh port" in away.err
    assert not (paceline.directory / "r").exists()

    crowded = paceline.run(
        *("train", "digits", "--global-batch", "2", "--hosts", "a:2,b:1", "--run-dir", "r"),
        env=near,
    )
    assert crowded.code == 2
    assert not (paceline.directory / "r").exists()


@pytest.mark.parametrize("end", ["SIGINT", "SIGKILL"])
@pytest.mark.slow
def test_a_launcher_that_ends_leaves_nothing_on_any_host(
    paceline: Paceline, near: Mapping[str, str], tmp_path: Path, end: str
) -> None:
    hostfile = _hostfile(tmp_path, first=1, second=1)
    process = paceline.start(
        *("train", "digits", "--epochs", "500", "--target-accuracy", "1.0"),
        *("--hostfile", hostfile, "--run-dir", "r"),
        env=near,
    )
    wait_for_step(tmp_path / "first" / "r", 1)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 8  # two each of ssh's stand-in, attempt, fork server, worker
    process.send_signal(signal.Signals[end])
    finished = paceline.finish(process)
    wait_until(lambda: not any(_runs(p) for p in started), "every process to end")
    if end == "SIGINT":
        assert finished.code == 75, finished.err
        assert f"Stopped. Resume: paceline resume {tmp_path}/r --hostfile" in finished.out


@pytest.mark.slow
def test_a_lost_host_is_replaced_by_what_is_left(
    paceline: Paceline, near: Mapping[str, str], tmp_path: Path
) -> None:
    hostfile = _hostfile(tmp_path, first=1, second=1)
    alone = paceline.run(*_TRAIN, "--workers", "1", "--run-dir", "alone")
    assert alone.code == 0, alone.err
    process = paceline.start(
        *(*_TRAIN, "--snapshot-every-steps", "5", "--hostfile", hostfile, "--run-dir", "r"),
        env=near,
    )
    wait_for_step(tmp_path / "first" / "r", 5)
    text = hostfile.read_text()
    hostfile.write_text(text.splitlines()[0])  # the second doesn't come back
    _lose_last_host(process.pid)
    done = paceline.finish(process)
    assert done.code == 0, done.err
    assert "All workers start again from the snapshot of step" in done.err
    run = paceline.directory / "r"
    assert summary(run)["nodes"] == 1
    assert summary(run)["weights_sha256"] == summary(paceline.directory / "alone")["weights_sha256"]


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (("--hosts", "a;id"), "no host name"),
        (("--hosts", "a", "--hostfile", "f"), "not both"),
        (("--hostfile", "nowhere.txt"), "can't be read"),
        (("--hosts", "a", "--on", "local"), "can't be combined"),
        (("--hosts", "a", "--on", "slurm"), "can't be combined"),
        (("--hosts", "a", "--min-hosts", "2"), "1 hosts are named"),
        (("--hosts", "a", "--rank", "0", "--world-size", "1"), "leave them out"),
        (("--min-hosts", "2"), "--min-hosts has no effect without --hosts or --hostfile"),
        (("--hosts", "a", "--nodes", "2"), "--nodes has no effect without --on"),
        (("--hosts", "a", "--ssh-config", "none"), "there is no file none"),
    ],
)
@pytest.mark.core_cases(4)
def test_what_makes_no_sense_is_refused(
    paceline: Paceline, given: tuple[str, ...], part: str
) -> None:
    refused = paceline.run("train", "digits", *given)
    assert refused.code == 2
    assert part in refused.err
    assert not (paceline.directory / "runs").exists()


def test_hosts_are_read_anew_each_time(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a")
    options = HostsOptions(hostfile=str(path))
    assert [host.name for host in options.read()] == ["a"]
    path.write_text("a\nb")
    assert [host.name for host in options.read()] == ["a", "b"]


def _lose_last_host(launcher: int) -> None:
    children = psutil.Process(launcher).children()
    [child for child in children if "guard" in " ".join(child.cmdline())][-1].kill()


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
