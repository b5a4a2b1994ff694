"""The comparison with other libraries: its commands, its table, and one side that needs none."""

import sys
from pathlib import Path

import pytest

from benchmarks.commands import ROOT
from benchmarks.peer_loops import SIDES
from benchmarks.peers import Plan, Runs, command, run_side, table


def test_each_side_is_a_command_on_two_workers() -> None:
    for side in SIDES:
        words = command(side, "mnist", "python3", Path("stamps"), 256)
        assert words[-4:] == (side, "mnist", "stamps", "256")
        assert ("paceline" in words) == side.startswith("paceline")
        assert "--workers 2" in " ".join(words) or "--nproc-per-node=2" in words


def test_the_table_has_medians_by_side_and_job() -> None:
    speeds = {"mnist": [900.0, 1100.0, 1000.0], "transformer": [5.0, 7.0, 6.0]}
    found = {
        job: {side: Runs(samples_per_s=values, first_step_s=[1.0, 2.0, 3.0]) for side in SIDES}
        for job, values in speeds.items()
    }
    _, _, *rows = table(found).splitlines()
    cells = [cell.strip() for cell in rows[-1].split("|")]
    assert len(rows) == len(SIDES)
    assert cells[2:5] == ["1,000", "6", "2.0 s"]


@pytest.mark.ranks
@pytest.mark.slow
def test_an_older_commits_side_trains_by_its_own_source(tmp_path: Path) -> None:
    worktree = tmp_path / "worktree"
    (worktree / ".venv" / "bin").mkdir(parents=True)
    python = worktree / ".venv" / "bin" / "python"
    noted = f'echo "$PYTHONPATH" >>{tmp_path}/paths'
    python.write_text(f'#!/bin/sh\n{noted}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (worktree / "src").symlink_to(ROOT / "src")
    side, runs = "paceline, before", Runs()
    plan = Plan(
        jobs=["transformer"], sides=[side], rounds=1, python="none", before=worktree, part=20
    )
    run_side(side, "transformer", plan, tmp_path, runs)
    assert runs.samples_per_s[0] > 0
    assert (tmp_path / "paths").read_text().startswith(str(worktree / "src"))
