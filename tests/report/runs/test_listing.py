"""The list of runs: which there are, how each stands, and how the list is sorted and filtered."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from paceline.launch.errors.error_records import describe, record
from paceline.report.charts import best_position
from paceline.report.load_run import read_run
from paceline.report.page import render_page
from paceline.report.runs.comparison import compare
from paceline.report.runs.listing import (
    RunList,
    list_runs,
    newest_unfinished,
    read_entry,
    run_of_command,
    shared_unit,
    table_lines,
)
from paceline.report.sections import epochs_table
from paceline.results.find_runs import MAX_LEVELS, find_runs
from paceline.results.run_directory import sample_unit
from tests.report.runs.conftest import MakeRun, change

NOW = datetime(2026, 3, 3, 9, 15, tzinfo=UTC)


def labels(listed: RunList) -> dict[str, str]:
    return {entry.label: entry.state for entry in listed.entries}


def test_each_run_is_listed_with_how_it_stands(make_run: MakeRun, folder: Path) -> None:
    make_run("done")
    make_run("stopped", ended="signal")
    make_run("killed", ended=None)
    failed = make_run("failed", ended=None)
    failed.logs.mkdir()
    record = {"rank": 1, "kind": "job", "error_type": "ValueError", "message": "wrong"}
    (failed.logs / "failure-rank-1.json").write_text(json.dumps(record))
    running = make_run("running", ended=None)
    starting = make_run("starting", ended=None)
    starting.run_json.unlink()
    with running.lock(), starting.lock():
        found = list_runs(folder)
    assert labels(found) == {
        "done": "finished",
        "failed": "failed",
        "killed": "died",
        "running": "running",
        "starting": "running",
        "stopped": "stopped",
    }


def test_what_failed_before_it_trained_is_listed_with_the_cause(
    make_run: MakeRun, folder: Path
) -> None:
    """A script that raised before its session."""
    run = make_run("before", ended=None)
    run.run_json.unlink()
    run.logs.mkdir()
    assert record(describe(ValueError("no data"), 1), run.logs)
    (entry,) = list_runs(folder).entries
    assert entry.state == "failed"
    (line,) = [line for line in table_lines(list_runs(folder).entries, NOW) if ": nothing" in line]
    assert line.startswith("before: nothing was trained: failed on rank 1 (")
    assert line.endswith(": ValueError: no data")


def test_what_is_damaged_is_listed_with_what_is_wrong(make_run: MakeRun, folder: Path) -> None:
    make_run("whole")
    make_run("cut").run_json.write_text('{"recipe": "dig')
    make_run("gone").run_json.unlink()
    make_run("table").metrics_csv.write_bytes(b"\0" * 100)
    found = list_runs(folder)
    assert labels(found)["cut"] == labels(found)["gone"] == "damaged"
    lines = table_lines(found.entries, NOW)
    assert (
        len([line for line in lines if line.startswith(("cut ", "gone ", "table ", "whole "))]) == 4
    )
    assert any(line.startswith("cut: run.json isn't valid JSON") for line in lines)
    assert "gone: run.json is missing or empty" in lines


def test_runs_are_found_in_studies_and_not_in_runs(make_run: MakeRun, folder: Path) -> None:
    make_run("study/trained/2-allreduce")
    outer = make_run("outer")
    make_run("outer/snapshots/inner")
    make_run(".hidden/run")
    (folder / "link").symlink_to(outer.path)
    deep = "/".join("d" * (MAX_LEVELS + 1))
    make_run(deep)
    found = find_runs(folder)
    assert [str(run.path.relative_to(folder)) for run in found.runs] == [
        "outer",
        "study/trained/2-allreduce",
    ]
    assert not found.whole
    assert find_runs(outer.path).whole
    assert [run.path for run in find_runs(outer.path).runs] == [outer.path]
    assert find_runs(folder / "nothing").runs == ()


def test_the_table_has_a_line_for_each_run_the_newest_first(
    make_run: MakeRun, folder: Path
) -> None:
    make_run("digits-20260302-101500")
    make_run("later", day=2, run={"settings": {"best_by": "val_loss", "name": "try", "tag": ["a"]}})
    listed = list_runs(folder).entries
    header, first, second = (line.split() for line in table_lines(listed, NOW))
    assert header == "run recipe state best epochs images/s workers started".split()
    assert first == "later digits finished 0.2857 2/2 6,914 2 1 d ago".split()
    assert second[:2] == ["digits-20260302-101500", "digits"]
    assert second[3:5] == ["94.65", "%"]
    found = listed[0].to_json()
    assert (found["name"], found["tags"], found["note"]) == ("try", ["a"], None)


def test_the_best_goes_by_what_the_run_goes_by(make_run: MakeRun, folder: Path) -> None:
    make_run("accuracy")
    make_run("loss", run={"settings": {"best_by": "val_loss"}})
    figures = {entry.label: entry.to_json() for entry in list_runs(folder).entries}
    assert figures["accuracy"]["best"] == pytest.approx(0.946478873)
    assert figures["loss"]["best"] == pytest.approx(0.285669532)
    assert figures["loss"]["best_by"] == "val_loss"


def test_of_equal_accuracies_the_lower_loss_is_the_best_everywhere(make_run: MakeRun) -> None:
    run = make_run("even", ended=None)
    rows = run.metrics_csv.read_text().splitlines()
    first = [*rows[1].split(",")[:6], "0.2", "0.9", *rows[1].split(",")[8:]]
    second = [*rows[2].split(",")[:6], "0.1", "0.9", *rows[2].split(",")[8:]]
    run.metrics_csv.write_text("\n".join([rows[0], ",".join(first), ",".join(second), ""]))
    report = read_run(run)
    assert best_position(report) == 1
    assert epochs_table(report).marked == 1


def test_the_newest_unfinished_run_goes_by_its_newest_start(
    make_run: MakeRun, folder: Path
) -> None:
    make_run("older", ended="signal", day=1)
    make_run("newer", ended=None, day=2)
    make_run("finished", day=5)
    newest = newest_unfinished(list_runs(folder).entries)
    assert newest is not None
    assert newest.label == "newer"
    change(folder / "older" / "run.json", history=[{"started_at": "2026-03-04T00:00:00+00:00"}])
    resumed = newest_unfinished(list_runs(folder).entries)
    assert resumed is not None
    assert resumed.label == "older"
    assert newest_unfinished(()) is None


def test_a_trial_of_a_study_is_not_the_newest_run(
    make_run: MakeRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    make_run("mine", ended=None, day=1)
    make_run("studied/runs/2-allreduce-1", ended=None, day=2)
    assert newest_label(folder) == ("studied/runs/2-allreduce-1",) * 2
    (folder / "studied" / "study.json").write_text("{}")
    assert newest_label(folder) == ("mine",) * 2


def newest_label(folder: Path) -> tuple[str, str]:
    unfinished = newest_unfinished(list_runs(folder).entries)
    assert unfinished is not None
    chosen = run_of_command((), "report", "Report of", "DIR").path
    return unfinished.label, str(chosen.relative_to(folder))


def test_samples_that_are_no_images_are_called_samples_everywhere(
    make_run: MakeRun, folder: Path
) -> None:
    runs = [make_run("images"), make_run("rows")]
    change(runs[1].run_json, derived={"sample_unit": "samples"})
    entries = [read_entry(run, run.path.name) for run in runs]
    assert [shared_unit(entries[:1]), shared_unit(entries)] == ["images", "samples"]
    headers = [table_lines(e, NOW)[0] for e in (entries[:1], entries)]
    assert ["images/s" in line for line in headers] == [True, False]
    assert ["samples/s" in line for line in headers] == [False, True]
    assert "samples/s" in [row.label for row in compare(entries).figures]
    assert "images/s" in [row.label for row in compare(entries[:1]).figures]
    page = render_page(entries[1].report)
    assert ("Samples/s" in page, "images/s" in page.lower()) == (True, False)


@pytest.mark.parametrize(
    ("found", "unit"),
    [
        ({"kind": "script"}, "samples"),
        ({"kind": "recipe"}, "images"),
        ({}, "images"),  # written before there were scripts
        ({"kind": "script", "derived": {"sample_unit": "images"}}, "images"),
        ({"kind": "recipe", "derived": {"sample_unit": "samples"}}, "samples"),
        ({"kind": "recipe", "derived": {"sample_unit": 3}}, "images"),
    ],
)
def test_what_samples_are_called(found: dict[str, object], unit: str) -> None:
    assert sample_unit(found) == unit
