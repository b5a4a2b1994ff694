"""Who may read what a training leaves behind."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import ExitCode
from tests.cli.conftest import Paceline

_SHORT = ("train", "digits", "--workers", "1", "--epochs", "1", "--global-batch", "256")


@pytest.fixture(autouse=True)
def _usual_umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def _modes(top: Path) -> dict[str, int]:
    """Each directory's and file's permissions."""
    paths = [top, *top.rglob("*")]
    return {str(path.relative_to(top)): stat.S_IMODE(path.stat().st_mode) for path in paths}


@pytest.mark.slow
def test_a_run_directory_is_its_owners_alone(cold_paceline: Paceline, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "one"
    ended = cold_paceline.run(*_SHORT, "--run-dir", run)
    assert ended.code == ExitCode.DONE, ended.err
    modes = _modes(run)
    assert {"run.json", "metrics.csv", "summary.json", "logs/rank-0.log", "report.html"} <= {*modes}
    assert [name for name, mode in modes.items() if mode & 0o077] == []
    assert stat.S_IMODE(run.parent.stat().st_mode) == 0o750  # it isn't a training's


@pytest.mark.slow
def test_a_team_may_read_one_that_is_shared(cold_paceline: Paceline, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = cold_paceline.run(*_SHORT, "--run-dir", run, "--share-run-dir")
    assert ended.code == ExitCode.DONE, ended.err
    modes = _modes(run)
    del modes["run.lock"]
    assert [name for name, mode in modes.items() if mode & 0o070 not in (0o040, 0o050)] == []
    assert [name for name, mode in modes.items() if mode & 0o007] == []


@pytest.mark.slow
def test_a_directory_that_was_there_keeps_its_permissions(
    cold_paceline: Paceline, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir(0o750)
    ended = cold_paceline.run(*_SHORT, "--run-dir", run)
    assert ended.code == ExitCode.DONE, ended.err
    modes = _modes(run)
    assert modes["."] == 0o750
    assert modes["logs"] == modes["snapshots"] == 0o700
    assert modes["logs/rank-0.log"] == 0o600
