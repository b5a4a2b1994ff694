"""The list of runs: which there are, how each stands, and how the list is sorted and filtered."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.launch.errors.error_records import describe, record
from paceline.report.charts import best_position
from paceline.report.live import RunFollower
from paceline.report.load_run import read_run
from paceline.report.page import render_page
from paceline.report.runs.comparison import compare
from paceline.report.runs.listing import (
    RunList,
    filter_runs,
    list_runs,
    newest_running,
    newest_unfinished,
    read_entry,
    setting_of,
    shared_unit,
    sort_runs,
)
from paceline.report.runs.pages import write_index
from paceline.report.runs.table import table_lines
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
    (line,) = [line for line in table_lines(list_runs(folder), NOW, None) if ": nothing" in line]
    assert line.startswith("before: nothing was trained: failed on rank 1 (")
    assert line.endswith(": ValueError: no data")


def test_what_is_damaged_is_listed_with_what_is_wrong(make_run: MakeRun, folder: Path) -> None:
    make_run("whole")
    make_run("cut").run_json.write_text('{"recipe": "dig')
    make_run("gone").run_json.unlink()
    make_run("table").metrics_csv.write_bytes(b"\0" * 100)
    (folder / "whole" / "notes.json").write_text("[1]")
    found = list_runs(folder)
    assert labels(found)["cut"] == labels(found)["gone"] == "damaged"
    lines = table_lines(found, NOW, None)
    assert (
        len([line for line in lines if line.startswith(("cut ", "gone ", "table ", "whole "))]) == 4
    )
    assert any(line.startswith("cut: run.json isn't valid JSON") for line in lines)
    assert "gone: run.json is missing or empty" in lines
    assert "whole: notes.json should hold a JSON object" in lines
    narrow = table_lines(found, NOW, 40)
    assert max(map(len, narrow[-6:])) <= 40
    assert "whole: notes.json should hold a JSON" in narrow


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


def test_a_list_fits_80_columns(make_run: MakeRun, folder: Path) -> None:
    make_run("digits-20260302-101500")
    make_run("digits-20260302-101501", run={"settings": {"best_by": "val_loss"}})
    lines = table_lines(list_runs(folder), NOW, 80)
    assert max(map(len, lines)) <= 80
    assert lines[1].split() == [
        *("digits-20260302-101500", "finished", "94.65", "%", "2/2", "6,914", "2", "2", "d", "ago")
    ]
    assert lines[2].split()[2] == "0.2857"
    make_run("a-sweep/of-many/learning-rates/cifar100-wideresnet-20260302-101500")
    make_run("x", run={"recipe": "cifar100-wideresnet"})
    lines = table_lines(list_runs(folder), NOW, 80)
    assert max(map(len, lines)) <= 80
    # No name is cut: a long one has a line of its own, above its figures.
    place = lines.index("a-sweep/of-many/learning-rates/cifar100-wideresnet-20260302-101500")
    assert lines[place + 1].split()[:3] == ["finished", "94.65", "%"]
    assert lines[place + 2].startswith("digits-20260302-101500  finished")


@pytest.mark.parametrize(
    ("width", "left_out"), [(120, []), (80, ["recipe"]), (72, ["recipe", "workers"])]
)
def test_the_recipe_gives_way_before_a_name_is_parted_from_its_row(
    width: int, left_out: list[str], make_run: MakeRun, folder: Path
) -> None:
    make_run("digits-20260302-101502")
    make_run("y", run={"recipe": "cifar100-wideresnet"})
    header, *rows = table_lines(list_runs(folder), NOW, width)
    assert [name for name in ("recipe", "workers") if name not in header] == left_out
    assert len(rows) == 2
    assert max(map(len, [header, *rows])) <= width


def test_a_name_given_to_a_run_is_shown_whole(make_run: MakeRun, folder: Path) -> None:
    make_run("digits-20260302-101502", run={"settings": {"name": "base"}})
    line = table_lines(list_runs(folder), NOW, 80)[1]
    assert line.startswith("base (digits-20260302-101502)  finished")


def test_tags_are_shown_where_there_is_room(make_run: MakeRun, folder: Path) -> None:
    make_run("a", run={"settings": {"tag": ["good", "old"]}})
    make_run("b")
    wide, narrow = (table_lines(list_runs(folder), NOW, width) for width in (120, 80))
    assert wide[0].endswith("started  tags")
    assert wide[1].endswith("d ago  good, old")
    assert wide[2].endswith("d ago")
    assert [line[: len(small)] for line, small in zip(wide, narrow, strict=True)] == narrow
    assert "tags" not in narrow[0] or len(narrow[1]) <= 80


def test_names_tags_and_settings_filter(make_run: MakeRun, folder: Path) -> None:
    make_run("a", run={"settings": {"name": "first", "tag": ["good", "old"]}})
    make_run("b", run={"settings": {"lr": 0.1}}).notes_json.write_text(
        json.dumps({"name": "", "tags": ["new"], "note": "n"})
    )
    make_run("c", ended="signal", run={"recipe": "mnist", "recipe_arguments": {"shift": 4}})
    listed = list_runs(folder).entries
    for conditions, expected in (
        (["tag=good"], "a"),
        (["tag=new"], "b"),
        (["name=fir*"], "a"),
        (["recipe=mnist"], "c"),
        (["state=finished"], "ab"),
        (["status=finished"], "ab"),
        (["state=finished", "lr=0.10"], "b"),
        (["shift=1"], "ab"),
        (["workers=2"], "abc"),
        (["global_batch=64", "global-batch=64"], "abc"),
        (["target-epochs=2", "patience=2"], "abc"),
        (["lr=7"], ""),
    ):
        assert "".join(e.label for e in filter_runs(listed, conditions)) == expected, conditions


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        ("finished", "NAME=VALUE"),
        ("state=ended", "running, finished, stopped, failed, died, damaged"),
        ("larning_rate=1", "name, recipe, state, tag, workers, and every setting"),
        ("target_epoch=2", r"name 'target-epoch'\. Did you mean 'target-epochs'\?"),
    ],
)
def test_a_wrong_filter_is_refused(
    condition: str, told: str, make_run: MakeRun, folder: Path
) -> None:
    make_run("a")
    with pytest.raises(UsageError, match=told):
        filter_runs(list_runs(folder).entries, [condition])


def test_sorted_by_a_setting_the_smallest_first(make_run: MakeRun, folder: Path) -> None:
    for name, lr in (("a", 0.1), ("b", 0.02), ("c", 0.3)):
        make_run(name, run={"settings": {"lr": lr, "optimizer": f"of {name}"}})
    listed = list_runs(folder).entries
    assert [entry.label for entry in sort_runs(listed, "lr")] == ["b", "a", "c"]
    assert [entry.label for entry in sort_runs(listed, "optimizer")] == ["a", "b", "c"]
    assert [entry.label for entry in sort_runs(listed, "target-epochs")] == ["a", "b", "c"]
    # What the list is sorted by is shown in it; a column is there already.
    assert (setting_of("lr"), setting_of("target-epochs")) == ("lr", "patience")
    assert setting_of("images/s") == setting_of("started") == ""
    lines = table_lines(list_runs(folder), NOW, 80, "lr")
    assert lines[0].split()[2:5] == ["state", "lr", "best"]
    assert [line.split()[3] for line in lines[1:]] == ["0.1", "0.02", "0.3"]
    with pytest.raises(UsageError, match=r"column 'larning'.*, and every setting"):
        sort_runs(listed, "larning")


def test_sorted_by_any_column_with_what_is_unknown_last(make_run: MakeRun, folder: Path) -> None:
    make_run("c", day=1, summary={"images_per_s": 10.0})
    make_run("b", day=3, summary={"images_per_s": 30.0})
    make_run("a", day=2, summary={"images_per_s": 20.0})
    make_run("lost", day=9).run_json.unlink()
    listed = list_runs(folder).entries

    def order(column: str) -> list[str]:
        return [entry.label for entry in sort_runs(listed, column)]

    # As the heading is written, too.
    assert order("images/s") == order("samples/s") == order("images-per-s")
    assert order("run") == order("name")

    assert order("name") == ["a", "b", "c", "lost"]
    assert order("started") == ["b", "a", "c", "lost"]
    assert order("images-per-s")[-2:] == ["a", "c"]
    assert order("workers")[-1] == "lost"
    with pytest.raises(UsageError, match="unknown column 'speed'"):
        order("speed")


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
    status = RunFollower(run).read()
    assert (status.best_epoch, status.best_val_loss) == (2, 0.1)
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


def test_a_trial_of_a_study_is_not_the_newest_run(make_run: MakeRun, folder: Path) -> None:
    make_run("mine", ended=None, day=1)
    make_run("studied/runs/2-allreduce-1", ended=None, day=2)
    assert newest_label(folder) == ("studied/runs/2-allreduce-1",) * 2
    (folder / "studied" / "study.json").write_text("{}")
    assert newest_label(folder) == ("mine",) * 2


def newest_label(folder: Path) -> tuple[str, str]:
    listed = list_runs(folder).entries
    unfinished, running = newest_unfinished(listed), newest_running(listed)
    assert unfinished is not None
    assert running is not None
    return unfinished.label, running.label


def test_samples_that_are_no_images_are_called_samples_everywhere(
    make_run: MakeRun, folder: Path
) -> None:
    runs = [make_run("images"), make_run("rows")]
    change(runs[1].run_json, derived={"sample_unit": "samples"})
    entries = [read_entry(run, run.path.name) for run in runs]
    assert [shared_unit(entries[:1]), shared_unit(entries)] == ["images", "samples"]
    headers = [
        table_lines(replace(list_runs(folder), entries=tuple(e)), NOW, None)[0]
        for e in (entries[:1], entries)
    ]
    assert ["images/s" in line for line in headers] == [True, False]
    assert ["samples/s" in line for line in headers] == [False, True]
    assert "samples/s" in [row.name for row in compare(entries).figures]
    assert "images/s" in [row.name for row in compare(entries[:1]).figures]
    page = write_index(list_runs(folder), NOW).read_text()
    assert ("samples/s" in page, "images/s" in page) == (True, False)
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
