"""Whatever a run directory holds, reading it gives what is there and says what isn't."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.report.load_run import read_run
from paceline.results.run_directory import RunDirectory

MakeRun = Callable[..., RunDirectory]


def failure(rank: int, kind: str, **more: object) -> str:
    record = {"rank": rank, "host": "node-1", "step": 37, "kind": kind, "error_type": "ValueError"}
    return json.dumps({**record, "message": f"from rank {rank}", "traceback": "", **more})


def test_whole_run(make_run: MakeRun) -> None:
    report = read_run(make_run(done=12, because="target"))
    assert len(report.metrics) == 12
    assert report.summary["stopped_because"] == "target"
    assert [s.best for s in report.snapshots] == [False, True]
    assert report.problems == ()


def test_empty_directory_gives_an_empty_report(tmp_path: Path) -> None:
    report = read_run(RunDirectory(tmp_path))
    assert len(report.metrics) == 0
    assert report.summary == {}
    assert report.problems == ("run.json is missing or empty",)


def test_what_cannot_be_read_is_not_called_missing(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    (problem,) = read_run(RunDirectory(tmp_path)).problems
    assert problem.startswith("run.json can't be read")


@pytest.mark.parametrize("content", ["{", "[1]", "\0\xff", '{"a": 1', "null", "[" * 100_000])
def test_damaged_json_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    report = read_run(RunDirectory(tmp_path))
    assert report.run == {}
    assert "run.json" in report.problems[0]


def test_a_resume_makes_summary_and_failures_of_the_run_before_old(make_run: MakeRun) -> None:
    run = make_run(because="signal")
    (run.logs / "failure-rank-0.json").write_text(failure(0, "job"))
    resumed = {"started_at": "2026-03-02T11:00:00+00:00", "from_step": 276, "reason": "resume"}
    description = json.loads(run.run_json.read_text())
    description["history"].append(resumed)
    run.run_json.write_text(json.dumps(description))
    for path in (run.summary_json, run.logs / "failure-rank-0.json"):
        os.utime(path, (1772445600, 1772445600))  # 10:00, before the resume
    report = read_run(run)
    assert report.summary == {}
    assert report.failures == ()
    assert len(report.earlier_failures) == 1


def test_failures_are_ordered_by_cause_and_by_attempt(make_run: MakeRun) -> None:
    run = make_run(because=None)
    lost = failure(0, "infrastructure", message="Connection closed by peer")
    (run.logs / "failure-rank-0.json").write_text(lost)
    (run.logs / "failure-rank-1.json").write_text(failure(1, "job"))
    (run.logs / "failure-rank-2.json").write_text('{"rank": 2')
    for attempt in (10, 2):
        name = f"attempt-{attempt}-failure-rank-1.json"
        (run.logs / name).write_text(failure(1, "infrastructure", step=attempt))
    report = read_run(run)
    assert [f.rank for f in report.failures] == [1, 0]
    assert [f.step for f in report.earlier_failures] == [2, 10]
    assert "failure-rank-2.json" in report.problems[0]


def test_snapshots_set_aside_are_known(make_run: MakeRun) -> None:
    run = make_run()
    (run.snapshots / "step-000000000300.damaged").mkdir()
    (run.snapshots / ".step-000000000400.tmp").mkdir()
    assert [s.damaged for s in read_run(run).snapshots] == [False, False, True]
