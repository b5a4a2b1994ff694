"""What a confined process may write, with Landlock and without."""

import shutil
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from safetensors.torch import save_file

from paceline.distributed.group import Group
from paceline.verify.isolation import confinement
from paceline.verify.isolation.landlock import landlock_version
from paceline.verify.isolation.project_copy import ProjectCopy
from paceline.verify.trial import Trial
from tests.support.ranks import run_ranks

T = TypeVar("T")
OWN = {"mine.txt": "mine", "data.bin": "x" * 9}


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trial:
    """A project, in whose copy a process is to run, and a directory that it may write to."""
    project, place = tmp_path / "project", tmp_path / "place"
    for directory in (project, place / "t", place / "copy", tmp_path / "more"):
        directory.mkdir(parents=True)
    for name, text in OWN.items():
        (project / name).write_text(text)
    monkeypatch.setattr("paceline.verify.isolation.project_copy._MOST_BYTES", 8)
    copy = ProjectCopy.around(project, place / "copy")
    copy.make()
    return Trial(
        request="",
        records="",
        steps=1,
        place=str(place),
        project=copy.project,
        copy=copy.copy,
        directory=str(project),
        writable=(str(tmp_path / "more"),),
    )


def confined(trial: Trial, act: Callable[[Path], T]) -> T:
    """Act in a process that is confined, given the user's project."""

    def run(_: Group) -> T:
        confinement.confine(trial)
        return act(Path(trial.project))

    return run_ranks(1, run)[0]


def write_much(project: Path) -> None:
    Path("mine.txt").write_text("other")
    torch.save({}, "checkpoint.pt")
    save_file({"x": torch.ones(1)}, "model.safetensors")
    with closing(sqlite3.connect("log.db")) as base:
        base.execute("create table x (y)")
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(".", f"{scratch}/all")
    shutil.copyfile("checkpoint.pt", project.parent / "more" / "best.pt")
    Path("mine.txt").replace("data.bin")  # takes the place of a link
    (project / "mine.txt").parent.mkdir(exist_ok=True)
    (project / "none").unlink(missing_ok=True)
    subprocess.run(["cp", "checkpoint.pt", "copied.pt"], check=True)


def test_files_of_the_copy_may_be_written_and_nothing_reaches_the_users(trial: Trial) -> None:
    confined(trial, write_much)
    project = Path(trial.project)
    assert {p.name: p.read_text() for p in project.iterdir()} == OWN
    assert (project.parent / "more" / "best.pt").is_file()
    assert Path(trial.copy, "data.bin").read_text() == "other"


DENIED: dict[str, Callable[[Path], object]] = {
    "open": lambda project: (project / "mine.txt").write_text("other"),
    "save": lambda project: torch.save({}, project / "mine.txt"),
    "mkdir": lambda project: (project / "mine.txt.d").mkdir(),
    "rename": lambda project: Path("mine.txt").replace(project / "mine.txt"),
    "remove": lambda project: (project / "mine.txt").unlink(),
    "rmtree": lambda project: shutil.rmtree(project),
    "chmod": lambda project: (project / "mine.txt").chmod(0o600),
    "link": lambda project: Path("data.bin").write_text("other"),
}


@pytest.mark.parametrize("has_landlock", [True, False])
def test_writing_elsewhere_is_denied_by_name(
    trial: Trial, monkeypatch: pytest.MonkeyPatch, has_landlock: bool
) -> None:
    if not has_landlock:
        monkeypatch.setattr(confinement, "write_only_below", lambda _: False)

    def act(project: Path) -> list[str]:
        messages = []
        for write in DENIED.values():
            with pytest.raises(PermissionError) as denied:
                write(project)
            messages.append(str(denied.value))
        return messages

    for message in confined(trial, act):
        assert trial.project in message
        assert "--writable" in message
    assert {p.name: p.read_text() for p in Path(trial.project).iterdir()} == OWN


@pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
def test_other_programs_cant_write_elsewhere(trial: Trial) -> None:
    def act(project: Path) -> int:
        return subprocess.run(["cp", "mine.txt", project / "new.txt"], check=False).returncode

    assert confined(trial, act) != 0
    assert {p.name: p.read_text() for p in Path(trial.project).iterdir()} == OWN
