"""The comparison with other libraries: its commands, its table, and one side that needs none."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.commands import ROOT
from benchmarks.memory import watch
from benchmarks.peer_loops import JOBS, SIDES
from benchmarks.peers import Runs, command, table
from benchmarks.stamps import read_stamps


def test_each_side_is_a_command_on_two_workers() -> None:
    stamps = Path("stamps")
    for side in SIDES:
        words = command(side, "mnist", "python3", stamps, 256)
        assert words[-4:] == (side, "mnist", "stamps", "256")
        assert ("paceline" in words) == side.startswith("paceline")
        assert "--workers 2" in " ".join(words) or "--nproc-per-node=2" in words


def test_the_table_has_medians_by_side_and_job() -> None:
    speeds = {"mnist": (900.0, 1100.0, 1000.0), "transformer": (5.0, 7.0, 6.0)}
    found = {
        job: {
            side: Runs(samples_per_s=list(values), first_step_s=[1.0, 2.0, 3.0]) for side in SIDES
        }
        for job, values in speeds.items()
    }
    head, _, *rows = table(found).splitlines()
    cells = [cell.strip() for cell in rows[-1].split("|")]
    assert head.count("|") == rows[0].count("|") == 5
    assert len(rows) == len(SIDES)
    assert cells[2:5] == ["1,000", "6", "2.0 s"]


def test_the_readme_has_a_place_for_it() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("<!-- benchmarks.peers -->") == text.count("<!-- end -->") == 1


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.core_cases(1)
def test_paceline_has_the_same_data_in_memory(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # torchvision sets it
    make, _ = JOBS[job]
    work = make(4 * 128)
    data, _ = work.in_memory()
    inputs, targets = work.data()[0]
    model = work.model()
    loss = work.loss(model(torch.stack([inputs] * 2)), torch.stack([torch.as_tensor(targets)] * 2))
    loss.backward()
    samples: Any = data.labels if hasattr(data, "labels") else data
    own: Any = work.data()
    assert len(samples) == len(own)
    if job == "mnist":
        assert torch.equal(data.labels, torch.tensor([label for _, label in own]))


@pytest.mark.ranks
@pytest.mark.slow
def test_one_side_trains(tmp_path: Path) -> None:
    assert watch(command("paceline", "transformer", sys.executable, tmp_path, 64), tmp_path)
    assert {stamp.steps for stamp in read_stamps(tmp_path)} == {2}
