"""The commit in `run.json`, held against git's own words."""

import subprocess
from pathlib import Path

import pytest

from paceline.training.run_record.revision import find_revision
from tests.support.needs import GIT, need


def _git(repository: Path, *words: str) -> str:
    name = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
    command = ["git", *name, *words]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    need(GIT)
    _git(tmp_path, "init", "-q")
    (tmp_path / "train.py").write_text("1\n")
    _git(tmp_path, "add", ".")
    return tmp_path


@pytest.mark.slow
def test_a_commit_and_whether_anything_differs_from_it(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = str(repository / "train.py")
    assert find_revision(script, limit_s=60) is None  # nothing has been committed yet
    _git(repository, "commit", "-qm", "first")
    head = _git(repository, "rev-parse", "HEAD")
    (repository / "runs").mkdir()
    (repository / "runs" / "untracked").touch()
    assert find_revision(script, limit_s=60) == {"commit": head, "dirty": False}
    (repository / "train.py").write_text("2\n")
    changed = {"commit": head, "dirty": True}
    assert find_revision(f"{script}:build", limit_s=60) == changed
    # A module's recipe: the working directory counts.
    monkeypatch.chdir(repository)
    assert find_revision("paceline.recipes.digits:build", limit_s=60) == changed


def test_where_git_says_nothing_nothing_is_known(tmp_path: Path) -> None:
    script = str(tmp_path / "train.py")
    assert find_revision(str(tmp_path / "gone" / "train.py")) is None
    assert find_revision(script, git=str(tmp_path / "no-git")) is None
    slow = tmp_path / "slow-git"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    assert find_revision(script, git=str(slow), limit_s=0.01) is None
