"""One table drives all launchers, one of another package among them."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.app import main
from paceline.errors import ExitCode, UsageError
from paceline.launch import registry
from paceline.launch.base import Launcher, Rendered
from paceline.launch.registry import LauncherEntry, launchers
from paceline.options import entry_points
from tests.launch.cluster_jobs import a_job
from tests.launch.waiting import patient
from tests.support.ports import free_port

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


OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "slurm": {},
    "kubernetes": {},
    "skypilot": {},
    "sagemaker": {
        "instance_type": "ml.g5.12xlarge",
        "role": "arn:aws:iam::123456789012:role/training",
        "s3_output": "s3://my-bucket/paceline",
    },
    "parallel": {},
}
"""What each launcher needs."""


def rendered(name: str, **changes: object) -> tuple[Launcher, Rendered]:
    entry = launchers()[name]
    launcher = entry.make(entry.options_class()(**OPTIONS[name]))
    image = None if name == "slurm" else "example.org/train:1"
    return launcher, launcher.render(a_job(image=image, **changes))


def test_every_launcher_stands_in_the_table(installed: Path) -> None:
    assert list(launchers()) == list(registry.launcher_names())
    assert launchers().keys() == OPTIONS.keys()


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.core_cases(5)
def test_what_is_rendered_goes_on_when_it_is_started_again(name: str, installed: Path) -> None:
    _, made = rendered(name)
    (text,) = made.files.values()
    words = text.replace('"', " ").replace(",", " ").split()
    assert {"train", "digits", "--epochs", "2", "--run-dir", "--resume"} <= {*words}
    (file,) = made.files
    assert made.submit[-1].endswith(f"/nowhere/runs/a/cluster/{file}")


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "sagemaker"])
def test_it_is_submitted_by_the_clusters_own_tool(
    name: str, installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, made = rendered(name)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=f"--submit needs {made.submit[0]}"):
        launcher.submit(made)
    tool = tmp_path / made.submit[0]
    tool.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/said\n')
    tool.chmod(0o755)
    launcher.submit(made)
    assert (tmp_path / "said").read_text().splitlines() == list(made.submit[1:])
    tool.write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(UsageError, match="exit code 3"):
        launcher.submit(made)


@pytest.fixture
def run_cli(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str]:
        code = main(["train", "digits", *words])
        out, err = capsys.readouterr()
        return code, out + err

    return run


def test_files_are_written_into_the_run_directory(
    tmp_path: Path, run_cli: Callable[..., tuple[int, str]]
) -> None:
    (tmp_path / "patch.yaml").write_text("mem: 64G\nexclusive: true\nrequeue: false\n")
    on_slurm = ("--on", "slurm", "--run-dir", "runs/a", "--job-patch", "patch.yaml")
    code, said = run_cli(*on_slurm, "--dry-run")
    assert (code, said[:12]) == (ExitCode.DONE, "#!/bin/bash\n")
    assert not (tmp_path / "runs").exists()
    code, said = run_cli(*on_slurm)
    script = tmp_path / "runs" / "a" / "cluster" / "slurm.sh"
    assert code == ExitCode.DONE
    assert "#SBATCH --mem=64G\n#SBATCH --exclusive\n" in script.read_text()
    assert "SBATCH --requeue" not in script.read_text()
    assert f"Submit:  sbatch {script}\nFollow:  tail -F {script.parent}/slurm.log\nStop:" in said
    (tmp_path / "patch.yaml").write_text("spec: {suspend: true}\n")
    code, said = run_cli("--on", "slurm", "--run-dir", "runs/c", "--job-patch", "patch.yaml")
    assert (code, "'spec' with several values" in said) == (ExitCode.USAGE, True)
    # A run directory that the nodes alone see has one of its name here.
    code, _ = run_cli("--on", "kubernetes", "--image", "x", "--run-dir", "/volume/b")
    assert code == ExitCode.DONE
    manifests = tmp_path / "runs" / "b" / "cluster" / "kubernetes.yaml"
    assert "- /volume/b\n" in manifests.read_text()


def test_another_training_is_gone_on_with_where_that_is_said(
    tmp_path: Path, run_cli: Callable[..., tuple[int, str]]
) -> None:
    (tmp_path / "run.json").write_text("{}")
    words = ("--on", "slurm", "--run-dir", str(tmp_path))
    code, said = run_cli(*words)
    assert code == ExitCode.USAGE
    assert "already holds a training" in said
    assert run_cli(*words, "--resume")[0] == ExitCode.DONE


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
    choices = re.search(
        r"\[choices: (auto, local, .*?)\]", " ".join(shown.replace("│", " ").split())
    )
    assert choices is not None
    assert {*registry.launcher_names(), "parallel"} <= set(choices[1].split(", "))
    assert "--parallel-port" in shown
    wrong = python("train", "--on", "parallel-2", site=tmp_path / "site", cwd=tmp_path)
    assert wrong.returncode == ExitCode.USAGE
    assert "parallel" in wrong.stderr


@pytest.mark.slow
def test_another_packages_launcher_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(PLUGIN, tmp_path / "site")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    where = ["--on", "parallel", "--nodes", "2", "--workers", "1", "--submit"]
    options = ["--epochs", "1", "--device", "cpu", "--threads", "1", "--run-dir", "runs/a"]
    words = ["train", "digits", *options, *where, "--parallel-port", str(free_port())]
    done = python(*words, site=tmp_path / "site", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
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
