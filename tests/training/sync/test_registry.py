"""Every way of combining gradients, ours and that of a package outside: one table for all."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from paceline.distributed.group import Group
from paceline.gradient_sync.registry import ENTRY_POINTS, OURS
from tests.support.ranks import run_ranks
from tests.support.warm import run_warm
from tests.training.sync.plugin.paceline_signs.majority import MajorityVote

PLUGIN = Path(__file__).with_name("plugin")
SETTINGS = {
    "ordered": ["--shards", "4"],
    "powersgd": ["--sync-warmup-steps", "8"],
    "signs": ["--lr", "0.001"],
}
"""Options with which each shows what it does within one epoch of 23 steps."""
MORE = ["--epochs", "2", "--allow-change", "epochs"]
TABLE = [*OURS, "signs"]
TRAIN = ["train", "digits", "--workers", "2", "--schedule", "constant", "--progress", "off"]


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """Install the package as pip would, into a directory that Python looks into."""
    project = tomllib.loads((PLUGIN / "pyproject.toml").read_text())["project"]
    listed = project["entry-points"][ENTRY_POINTS]
    info = tmp_path / "site" / f"paceline_signs-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"[{ENTRY_POINTS}]", *(f"{name} = {value}" for name, value in listed.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    paths = [str(info.parent), str(PLUGIN), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def paceline(env: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "paceline", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def trained(env: dict[str, str], run: Path, *words: str, cold: bool) -> dict[str, object]:
    if cold:
        ended = paceline(env, *words)
    else:
        ended = run_warm([sys.executable, "-m", "paceline", *words], run.parent, **env)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    summary: dict[str, object] = json.loads((run / "summary.json").read_text())
    return summary


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.slow
def test_a_resumed_training_ends_with_the_same_bits(
    name: str, installed: dict[str, str], tmp_path: Path
) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    words = [*TRAIN, "--sync", name, *SETTINGS.get(name, [])]
    cold = name not in OURS  # other packages are found while all is imported
    once = trained(installed, whole, *words, "--epochs", "2", "--run-dir", str(whole), cold=cold)
    trained(installed, parted, *words, "--epochs", "1", "--run-dir", str(parted), cold=cold)
    again = trained(installed, parted, "resume", str(parted), *MORE, cold=cold)
    assert once["sync"] == again["sync"] == name
    assert once["steps"] == again["steps"]
    assert float(str(again["val_accuracy"])) > 0.5
    assert once["weights_sha256"] == again["weights_sha256"]


def test_the_page_shows_this_package() -> None:
    page = (Path(__file__).parents[3] / "docs" / "internals" / "add-a-gradient-sync.md").read_text()
    held = "".join(file.read_text() for file in PLUGIN.rglob("*.*") if file.suffix != ".pyc")
    shown = [block.partition("\n")[2] for block in page.split("```")[1::2]]
    assert len(shown) == 3
    assert [block for block in shown if block not in held] == []


def test_help_names_them_all(installed: dict[str, str]) -> None:
    shown = paceline(installed, "train", "digits", "--help-all").stdout
    said = " ".join(shown.replace("│", "").split())
    choices = said[said.index("[choices: allreduce") :]
    assert choices[10 : choices.index("]")].replace(",", "").split() == TABLE
    assert "signs: a vote of the workers" in said


def test_a_package_that_cannot_be_imported_is_named(
    installed: dict[str, str], tmp_path: Path
) -> None:
    points = next((tmp_path / "site").glob("*/entry_points.txt"))
    points.write_text(f"[{ENTRY_POINTS}]\nsigns = paceline_signs:ABSENT\n")
    ended = paceline(installed, "train", "digits", "--workers", "1")
    assert ended.returncode == 2
    assert "paceline-signs adds --sync signs (paceline_signs:ABSENT)" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_package_cannot_take_a_name_of_ours(installed: dict[str, str], tmp_path: Path) -> None:
    points = next((tmp_path / "site").glob("*/entry_points.txt"))
    points.write_text(f"[{ENTRY_POINTS}]\npowersgd = paceline_signs:ENTRY\n")
    ended = paceline(installed, "train", "digits", "--workers", "1")
    assert ended.returncode == 2
    assert "paceline-signs adds --sync powersgd" in ended.stderr


@pytest.mark.slow
def test_signs_refuse_a_loss_scaler(installed: dict[str, str], tmp_path: Path) -> None:
    words = [*TRAIN, "--sync", "signs", "--precision", "fp16", "--run-dir", str(tmp_path / "run")]
    ended = paceline(installed, *words)
    assert ended.returncode == 2, ended.stderr + ended.stdout
    assert "--sync signs can't be combined with --precision fp16" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.ranks
def test_votes_are_those_of_the_majority() -> None:
    rows = [[1.0, -2.0, 3.0, 0.0], [0.5, 2.0, -1.0, 0.0], [-9.0, 1.0, -1.0, 0.25]]

    def body(group: Group) -> list[float]:
        gradient = torch.tensor(rows[group.rank])
        MajorityVote(group).average_({"weight": gradient})
        voted: list[float] = gradient.tolist()
        return voted

    assert run_ranks(3, body) == [[1, 1, -1, 1]] * 3
