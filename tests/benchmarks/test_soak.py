"""The driver of random faults: what it draws, what it checks, and that it can fail."""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from benchmarks import soak
from benchmarks.commands import ROOT
from benchmarks.injection import checks
from benchmarks.injection.draw import Traits, draw, runs
from benchmarks.injection.table import KINDS, traits
from benchmarks.injection.training import EPOCHS
from benchmarks.injection.trial import Record, run_apart

_RECORD = Record(
    number=3,
    kinds=("a power cut",),
    form="recipe",
    workers=2,
    codes=(-9, 0),
    problems=(),
    missed=False,
    seconds=9.5,
)


# What is drawn.


def test_a_seed_and_a_number_settle_a_run() -> None:
    assert [draw(4, n, traits()) for n in range(300)] == [draw(4, n, traits()) for n in range(300)]
    assert draw(4, 7, traits()) != replace(draw(5, 7, traits()), seed=4)


def test_every_kind_comes_once_in_a_round() -> None:
    drawn = [draw(1, n, traits()) for n in range(3 * len(KINDS))]
    assert set(Counter(found.kinds[0] for found in drawn).values()) == {3}
    assert 0.1 < sum(len(found.kinds) == 2 for found in drawn) / len(drawn) < 0.4


def test_a_run_has_as_many_workers_as_its_faults_need() -> None:
    for found in (draw(2, n, traits()) for n in range(500)):
        least = max(KINDS[name].traits.least_workers for name in found.kinds)
        assert least <= found.workers <= 3
        assert 0 <= found.rank < found.workers
        assert all(least <= workers <= 3 for workers in found.resume_on)
        assert all(KINDS[name].traits.comes_second for name in found.kinds[1:])
        assert len(found.kinds) == 1 or KINDS[found.kinds[0]].traits.comes_first
        form = KINDS[found.kinds[0]].traits.form
        assert form in (None, found.form)


def test_what_cant_be_done_here_leaves_all_other_runs_as_they_are() -> None:
    some = {name: Traits(comes_first=True, comes_second=name in "ab") for name in "abcd"}
    everything = list(islice(runs(0, some), 100))
    fewer = list(islice(runs(0, some, left_out=["b"]), 50))
    assert fewer == [found for found in everything if "b" not in found.kinds][: len(fewer)]
    assert list(runs(0, some, left_out="abcd")) == []
    assert {found.kinds for found in islice(runs(0, some, only=["a"]), 9)} <= {("a",), ("a", "a")}


def test_there_are_enough_kinds() -> None:
    assert len(KINDS) >= 40


# What is checked.


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run directory as a good training leaves it, written by hand."""
    weights = {"fc.weight": np.arange(6, dtype=np.float32).reshape(2, 3)}
    tensors = {f"model/{name}": array for name, array in weights.items()}
    run = tmp_path / "run"
    snapshot = run / "snapshots" / "step-000000000092"
    snapshot.mkdir(parents=True)
    (run / "logs").mkdir()
    (run / "logs" / "rank-0.log").touch()
    content = save({**tensors, "optimizer/fc.weight/momentum_buffer": np.ones((2, 3))})
    (snapshot / "tensors.safetensors").write_bytes(content)
    entry = {"bytes": len(content), "sha256": _sha256(content)}
    (snapshot / "manifest.json").write_text(json.dumps({"files": {"tensors.safetensors": entry}}))
    told = b"fc.weight\0float32\0(2, 3)\0" + weights["fc.weight"].tobytes()
    summary = {"weights_sha256": _sha256(told), "epochs": EPOCHS, "stopped_because": "epochs"}
    (run / "summary.json").write_text(json.dumps(summary))
    rows = "".join(f"{epoch},{23 * epoch}\n" for epoch in range(1, EPOCHS + 1))
    for table in ("metrics.csv", "steps.csv"):
        (run / table).write_text("epoch,step\n" + rows)
    return run


def _sha256(content: bytes) -> str:
    done = subprocess.run(["sha256sum"], input=content, capture_output=True, check=True)
    return done.stdout.decode().split()[0]


def _problems(run_dir: Path, wanted: str | None = None) -> list[str]:
    return checks.problems_at_the_end(run_dir, wanted, EPOCHS)


def test_a_good_end(run_dir: Path) -> None:
    wanted = json.loads((run_dir / "summary.json").read_text())["weights_sha256"]
    assert _problems(run_dir, wanted) == []


def test_other_weights(run_dir: Path) -> None:
    (problem,) = _problems(run_dir, "0" * 64)
    assert "undisturbed 0000" in problem


def test_final_weights_that_no_snapshot_holds(run_dir: Path) -> None:
    path = run_dir / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"weights_sha256": "1" * 64}))
    assert _problems(run_dir) == ["the newest snapshot doesn't hold the final weights"]


def test_a_training_cut_short(run_dir: Path) -> None:
    path = run_dir / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"stopped_because": "signal"}))
    assert _problems(run_dir) == ["4 epochs, stopped because signal"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"epoch,step\n1,23\n2,46\n4,92\n", "['1', '2', '4']"),
        (b"epoch,step\n1,23\n2,46\n2,46\n3,69\n4,92\n", "['1', '2', '2', '3', '4']"),
        (b"epoch,step\n1,23\n\0\0\0", "NUL"),
    ],
)
def test_a_table_with_rows_missing_or_too_many(content: bytes, problem: str, run_dir: Path) -> None:
    (run_dir / "metrics.csv").write_bytes(content)
    (found,) = _problems(run_dir)
    assert problem in found


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"epoch,step\n1,20\n2,40\n2,40\n", "[20, 40, 40]"),
        (b"epoch,step\n2,40\n1,20\n", "[40, 20]"),
        (b"epoch,step\n1,23\n\0\0\0", "NUL"),
    ],
)
def test_steps_twice_or_out_of_order(content: bytes, problem: str, run_dir: Path) -> None:
    (run_dir / "steps.csv").write_bytes(content)
    (found,) = _problems(run_dir)
    assert problem in found


def test_a_torn_snapshot(run_dir: Path) -> None:
    torn = run_dir / "snapshots" / "step-000000000069"
    torn.mkdir()
    (torn / "manifest.json").write_text('{"files": {"state.json": {"bytes": 3, "sha256": "0"}}}')
    (torn / "state.json").write_bytes(b"{}")
    (found,) = _problems(run_dir)
    assert "step-000000000069: state.json has 2 bytes instead of 3" in found


@pytest.mark.parametrize(
    "name",
    [".run.json.0a1b2c3d", "logs/.probe-h-1", "snapshots/.tmp-x", "core", "logs/workers.json"],
)
def test_files_that_no_page_names(name: str, run_dir: Path) -> None:
    (run_dir / name).touch()
    assert _problems(run_dir) == [f"not documented: {name}"]


def test_leftovers(tmp_path: Path) -> None:
    (tmp_path / "torchinductor_me").mkdir()
    (tmp_path / f"paceline-{os.geteuid()}").mkdir()
    assert checks.leftovers([tmp_path]) == []
    (tmp_path / "paceline-xyz").mkdir()
    (tmp_path / f"paceline-{os.geteuid()}" / "0a1b").mkdir()
    names = sorted([f"paceline-{os.geteuid()}", "paceline-xyz"])
    assert checks.leftovers([tmp_path]) == [str(tmp_path / name) for name in names]


# What is kept and shown.


def test_results_are_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    assert soak.read_records(path, 1) == {}
    soak.write_records(path, 1, {3: _RECORD})
    assert soak.read_records(path, 1) == {3: _RECORD}
    with pytest.raises(SystemExit, match="--seed 1, not 2"):
        soak.read_records(path, 2)


def test_the_table_counts_runs_and_those_that_ended_well() -> None:
    failed = replace(_RECORD, number=4, problems=("weights 12, undisturbed 34",))
    rows = soak.table([_RECORD, failed]).splitlines()
    assert rows[2:] == ["| a power cut | 2 | 1 |", "| all | 2 | 1 |"]


def test_a_failure_says_how_to_repeat_it(tmp_path: Path) -> None:
    failed = replace(_RECORD, problems=("weights 12, undisturbed 34",))
    told = soak.describe(failed, 8, tmp_path)
    assert "FAILED\nweights 12, undisturbed 34\n" in told
    assert "python -m benchmarks.soak --seed=8 --number=3" in told
    assert "FAILED" not in soak.describe(_RECORD, 8, tmp_path)


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(["--only", "earthquake"])
    assert "--list" in capsys.readouterr().err


# Whole runs.

_SHORT = "1 21"
"""Runs of a recipe and a script, without kinds that wait for half a minute."""


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.xdist_group("soak")
def test_a_wrong_hash_is_noticed(tmp_path: Path) -> None:
    drawn = replace(draw(1, 0, traits()), kinds=("SIGKILL to a worker",), form="recipe")
    record = run_apart(drawn, tmp_path / "room", "0" * 64)
    assert record.codes == (0,)
    assert "undisturbed 0000000000000000" in record.problems[0]


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.xdist_group("soak")
@pytest.mark.timeout(3000)
def test_two_runs_end_as_documented(tmp_path: Path) -> None:
    jobs = max(2, min(4, (os.cpu_count() or 1) // 2))
    words = ["--seed", "1", "--jobs", str(jobs), "--number", *_SHORT.split()]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", *words],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 of 2 runs ended as documented" in done.stdout
