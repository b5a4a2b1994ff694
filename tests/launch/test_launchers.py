"""One table drives all launchers, one of another package among them, against stand-ins."""

import os
import re
import signal
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from paceline.errors import ExitCode, UsageError
from paceline.launch import follow, registry
from paceline.launch.cluster import ClusterJob
from paceline.launch.registry import LauncherEntry, launchers
from paceline.options import entry_points
from tests.launch.cluster_jobs import a_job
from tests.launch.clusters import CLUSTERS, RUN_DIR, Cluster
from tests.launch.waiting import patient, until

PLUGIN = Path(__file__).parent / "plugin"
"""A package of somebody else's, with a launcher called parallel."""


def install(package: Path, site: Path) -> None:
    """Put a package where Python finds it, with the entry points of its pyproject.toml."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    described = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    described.mkdir(parents=True)
    for source in package.glob("*.py"):
        (site / source.name).write_text(source.read_text())
    names = f"Name: {project['name']}\nVersion: {project['version']}\n"
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\n{names}")
    groups = [
        "\n".join((f"[{group}]", *(f"{name} = {value}" for name, value in points.items()), ""))
        for group, points in project["entry-points"].items()
    ]
    (described / "entry_points.txt").write_text("\n".join(groups))


def forget() -> None:
    registry.launchers.cache_clear()
    entry_points._installed.cache_clear()


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    install(PLUGIN, tmp_path / "site")
    monkeypatch.syspath_prepend(tmp_path / "site")
    forget()
    yield tmp_path / "site"
    sys.modules.pop("paceline_parallel", None)
    forget()


@pytest.fixture(params=CLUSTERS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def cluster(
    name: str, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cluster]:
    monkeypatch.setattr(follow, "LOOK_S", 0.01)
    cluster = CLUSTERS[name](tmp_path, monkeypatch)
    with cluster.running():
        yield cluster


Launch = Callable[..., int]


@pytest.fixture
def launch(name: str, cluster: Cluster, tmp_path: Path) -> Launch:
    (tmp_path / "train.py").write_text("print(1)\n")

    def run(**changes: object) -> int:
        entry = launchers()[name]
        image = None if name == "slurm" else "example.org/train:1"
        job: ClusterJob = a_job(directory=tmp_path, run_dir=RUN_DIR, image=image, **changes)
        return follow.launch(entry.make(entry.options_class()(**cluster.options)), job)

    return run


def test_every_launcher_stands_in_the_table(installed: Path) -> None:
    assert list(launchers()) == list(registry.launcher_names())
    assert launchers().keys() == CLUSTERS.keys()


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.JOB])
@pytest.mark.core_cases(5)
def test_output_is_shown_and_the_exit_code_is_the_trainings(
    code: ExitCode, cluster: Cluster, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.play("epoch 1\nepoch 2\n", code)
    assert launch() == code
    out = capsys.readouterr().out
    assert 0 <= out.index("epoch 1\n") < out.index("epoch 2\n")
    assert not cluster.was_stopped()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.core_cases(4)
def test_a_signal_stops_the_job_for_a_resume(
    number: signal.Signals, cluster: Cluster, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.play("epoch 1\n", None)

    def send() -> None:
        until(cluster.has_job)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    assert launch() == ExitCode.RESUMABLE
    thread.join()
    assert cluster.was_stopped()
    out, err = capsys.readouterr()
    assert "epoch 1\n" in out
    assert err.count("Stopping ") == 1


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # meant to
@pytest.mark.core_cases(2)
def test_detached_the_job_runs_on(cluster: Cluster, launch: Launch) -> None:
    cluster.play("epoch 1\n", None, detached=True)
    assert launch(detach=True) == ExitCode.DONE
    assert not cluster.was_stopped()


def test_a_dry_run_hands_nothing_over(
    cluster: Cluster, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.play("epoch 1\n", ExitCode.DONE)
    assert launch(dry_run=True) == ExitCode.DONE
    assert capsys.readouterr().out.strip()
    assert not cluster.has_job()


def python(*words: str, site: Path, cwd: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-m", "paceline", *words],
        env={**os.environ, "PYTHONPATH": str(site), "COLUMNS": "200"},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )


def test_another_packages_launcher_is_in_the_help(tmp_path: Path) -> None:
    install(PLUGIN, tmp_path / "site")
    shown = python("train", "--help-all", site=tmp_path / "site", cwd=tmp_path).stdout
    choices = re.search(r"\[choices: (auto, local, .*?)\]", " ".join(shown.split()))
    assert choices is not None
    assert {*registry.launcher_names(), "parallel"} <= set(choices[1].split(", "))
    assert "--parallel-python" in shown
    wrong = python("train", "--on", "parallel-2", site=tmp_path / "site", cwd=tmp_path)
    assert wrong.returncode == ExitCode.USAGE
    assert "parallel" in wrong.stderr


@pytest.mark.slow
def test_another_packages_launcher_trains(tmp_path: Path) -> None:
    install(PLUGIN, tmp_path / "site")
    where = ["--on", "parallel", "--nodes", "2", "--workers", "1", "--parallel-python"]
    options = ["--epochs", "1", "--device", "cpu", "--threads", "1", "--run-dir", "runs/a"]
    words = ["train", "digits", *options, *where, sys.executable]
    done = python(*words, site=tmp_path / "site", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Started 2 processes" in done.stdout
    summary = (tmp_path / "runs" / "a" / "summary.json").read_text()
    assert '"world_size": 2' in summary
    assert '"nodes": 2' in summary


BROKEN: Mapping[str, tuple[str, str]] = {
    "gone": ('x = "nowhere_at_all:ENTRY"', "can't be imported: No module"),
    "renamed": ('x = "paceline_parallel:ENTRI"', "can't be imported"),
    "taken": ('slurm = "paceline_parallel:ENTRY"', "has a name that is taken"),
    "reserved": ('local = "paceline_parallel:ENTRY"', "has a name that is taken"),
    "other": ('x = "paceline_parallel:ParallelLauncher"', "should be a LauncherEntry"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.core_cases(1)
def test_a_broken_package_is_named(case: str, tmp_path: Path, installed: Path) -> None:
    point, said = BROKEN[case]
    name, _, value = point.partition(" = ")
    (points,) = installed.glob("*.dist-info/entry_points.txt")
    points.write_text(f"[{registry.GROUP}]\n{name} = {value.strip(chr(34))}\n")
    forget()
    with pytest.raises(UsageError, match=rf"the launcher '{name}' .*{said}"):
        launchers()


def test_an_entry_names_what_is_there() -> None:
    for entry in launchers().values():
        assert isinstance(entry, LauncherEntry)
        entry.make(entry.options_class()())
