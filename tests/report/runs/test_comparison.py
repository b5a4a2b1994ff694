"""Runs side by side: what differs, how each ended, and their curves over each other."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.report.runs.comparison import MAX_SHOWN, Comparison, choose_runs, compare
from paceline.report.runs.curves import choose_metric, curve, curve_pictures, curve_tables
from paceline.report.runs.text import comparison_lines
from paceline.results.find_runs import choose_run
from paceline.results.run_directory import RunDirectory
from tests.report.runs.conftest import MakeRun, change


def compared(*runs: RunDirectory) -> Comparison:
    return compare(choose_runs([str(run.path) for run in runs]))


def settings(shown: Comparison) -> dict[str, tuple[object, ...]]:
    return {row.name: row.values for row in shown.settings}


def write_metrics(run: RunDirectory, *columns: str, rows: Sequence[tuple[object, ...]]) -> None:
    lines = [",".join(columns), *(",".join(map(str, row)) for row in rows)]
    run.metrics_csv.write_text("\n".join(lines) + "\n")


def test_only_what_differs_is_shown(make_run: MakeRun) -> None:
    first = make_run("a", run={"settings": {"name": "one", "workers": 1, "shards": None}})
    second = make_run(
        "b",
        run={
            "settings": {"lr": 0.1, "workers": None},
            "recipe_arguments": {"shift": 4},
            "derived": {"world_size": 4, "shards": 4, "lr": 0.1},
            "versions": {"torch": "2.16.0"},
            "hosts": [{"host": "node-2", "device": "CPU"}],
        },
    )
    assert settings(compared(first, second)) == {
        "shift": (1, 4),
        "lr": (0.05, 0.1),
        "workers": (2, 4),
        "torch": ("2.15.0", "2.16.0"),
        "hosts": (["node-1, CPU (x86_64, AVX512)"], ["node-2, CPU"]),
    }
    assert settings(compared(first, make_run("c"))) == {}


def test_what_was_left_open_counts_as_what_it_came_to(make_run: MakeRun) -> None:
    first = make_run("a", run={"settings": {"global_batch": None}})
    second = make_run("b")
    third = make_run("c", run={"settings": {"global_batch": None}, "derived": {"global_batch": 8}})
    assert settings(compared(first, second, third)) == {"global_batch": (64, 64, 8)}


def test_what_a_script_has_not_is_no_setting_of_it(make_run: MakeRun) -> None:
    words = ["--lr", "0.3", "my data"]
    script = {"kind": "script", "script_args": words, "settings": {"lr": 0.1, "epochs": 2}}
    recipe = {"settings": {"epochs": 3}}
    shown = settings(compared(make_run("a", run=recipe), make_run("b", run=script)))
    assert shown["lr"] == (0.05, None)
    assert shown["momentum"][1] is None
    assert shown["epochs"] == (3, 2)
    assert shown["script arguments"] == (None, "--lr 0.3 'my data'")


def test_runs_of_other_figures_leave_cells_empty(make_run: MakeRun) -> None:
    usual = make_run("recipe")
    script = make_run(
        "script",
        run={"kind": "script", "recipe": "train.py", "recipe_arguments": {}},
        summary={"val_accuracy": None, "val_loss": None, "figures": {"val_bleu": 31.25}},
    )
    write_metrics(script, "epoch", "step", "time_s", "val_bleu", rows=[(1, 10, 1.0, 31.25)])
    shown = compared(usual, script)
    cells = {row.name: row.cells for row in shown.figures}
    assert cells["best accuracy"] == ("94.65 %", "–")  # noqa: RUF001
    assert cells["val_bleu"] == ("–", "31.25")  # noqa: RUF001
    assert choose_metric(shown.runs, None) == "val_accuracy"
    assert choose_metric(shown.runs, "val-bleu") == "val_bleu"
    with pytest.raises(UsageError, match="unknown figure 'bleu'"):
        choose_metric(shown.runs, "bleu")
    (by_step, *_) = curve_tables(shown, "val_accuracy")
    assert {row.cells[1] for row in by_step.rows} == {""}
    assert [len(picture.lines) for picture in curve_pictures(shown, "step")] == [1, 1, 1]


def test_curves_go_by_step_time_and_samples(make_run: MakeRun) -> None:
    run = make_run("a", run={"derived": {"train_samples": 100}})
    write_metrics(
        *(run, "epoch", "step", "time_s", "val_loss"),
        rows=[(1, 10, 2.5, 3.0), (2, 20, 5.0, ""), (3, 30, 7.5, 1.0)],
    )
    entry = compared(run, make_run("b")).runs[0]
    assert curve(entry, "val_loss", "step") == ((10, 3.0), (30, 1.0))
    assert curve(entry, "val_loss", "time") == ((2.5, 3.0), (7.5, 1.0))
    assert curve(entry, "val_loss", "samples") == ((100, 3.0), (300, 1.0))
    assert curve(entry, "nothing", "step") == ()


def test_what_was_recorded_within_epochs_counts_first(make_run: MakeRun) -> None:
    stopped, usual = make_run("stopped", ended="signal"), make_run("usual")
    stopped.metrics_csv.unlink()
    change(stopped.summary_json, train_loss=None, steps=None, train_time_s=None)
    stopped.steps_csv.write_text(
        "epoch,step,time_s,samples,train_loss,lr\n1,5,0.5,320,2.5,0.1\n1,9,1.5,576,2.0,0.1\n"
    )
    shown = compared(stopped, usual)
    entry = shown.runs[0]
    assert curve(entry, "train_loss", "step") == ((5, 2.5), (9, 2.0))
    assert curve(entry, "train_loss", "time") == ((0.5, 2.5), (1.5, 2.0))
    assert curve(entry, "train_loss", "samples") == ((320, 2.5), (576, 2.0))
    # In a picture means over several steps stand in their middle.
    drawn = curve_pictures(compare([entry]), "step")[0].lines[0].points
    assert list(drawn) == [(3, 2.5), (7, 2.0)]
    values = {row.name: row.values[0] for row in shown.figures}
    assert (values["training loss"], values["steps"], values["training time"]) == (2.0, 9, 1.5)
    assert choose_metric(shown.runs, "lr") == "lr"


def test_a_table_has_the_newest_value_up_to_each_place(make_run: MakeRun) -> None:
    short, long = make_run("short"), make_run("long")
    rows = [(epoch, 10 * epoch, epoch, 1 - 0.05 * epoch) for epoch in range(1, 13)]
    columns = ("epoch", "step", "time_s", "val_loss")
    write_metrics(short, *columns, rows=rows[:3])
    write_metrics(long, *columns, rows=rows)
    by_step, by_time, by_samples = curve_tables(compared(short, long), "val_loss")
    assert [(row.name, *row.cells) for row in by_step.rows] == [
        ("20", "0.9000", "0.9000"),
        ("30", "0.8500", "0.8500"),  # where the first one ends
        ("40", "", "0.8000"),
        ("60", "", "0.7000"),
        ("80", "", "0.6000"),
        ("100", "", "0.5000"),
        ("120", "", "0.4000"),
    ]
    assert by_time.rows[-1].name == "12 s"
    assert by_samples.rows[-1].name == f"{12 * 1442:,}"


def test_a_table_has_no_row_without_values(make_run: MakeRun) -> None:
    run, other = make_run("run"), make_run("other")
    for each in (run, other):
        rows = [(1, 50, 5.0, 0.9), (2, 100, 10.0, 0.7)]
        write_metrics(each, "epoch", "step", "time_s", "val_loss", rows=rows)
    by_step, *_ = curve_tables(compared(run, other), "val_loss")
    assert [(row.name, *row.cells) for row in by_step.rows] == [
        ("60", "0.9000", "0.9000"),
        ("100", "0.7000", "0.7000"),
    ]


def test_counts_are_grouped_and_settings_have_the_names_of_the_help(make_run: MakeRun) -> None:
    small = {"settings": {"patience": 1}, "derived": {"parameters": 1234}}
    large = {"settings": {"patience": 3}, "derived": {"parameters": 5678901}}
    shown = compared(make_run("a", run=small), make_run("b", run=large))
    assert {row.label: row.cells for row in shown.settings} == {
        "target-epochs": ("1", "3"),
        "parameters": ("1,234", "5,678,901"),
    }
    assert {row.name for row in shown.settings} == {"patience", "parameters"}  # of --json


def test_a_table_repeats_no_value(make_run: MakeRun) -> None:
    seldom, often = make_run("seldom"), make_run("often")
    columns = ("epoch", "step", "time_s", "val_loss")
    write_metrics(seldom, *columns, rows=[(1, 20, 2.0, 0.9), (2, 90, 9.0, 0.7)])
    write_metrics(often, *columns, rows=[(n, 10 * n, n, 1 - 0.05 * n) for n in range(1, 13)])
    by_step, *_ = curve_tables(compared(seldom, often), "val_loss")
    assert [(row.name, row.cells[0]) for row in by_step.rows] == [
        ("20", "0.9000"),
        ("40", ""),
        ("60", ""),
        ("80", ""),
        ("90", "0.7000"),
        ("100", ""),
        ("120", ""),
    ]


def test_the_figure_that_most_runs_have_is_shown(make_run: MakeRun) -> None:
    runs = make_run("a"), make_run("b", run={"settings": {"best_by": "val_loss"}})
    for run in runs:  # rows within the epochs, too, have the training loss
        run.steps_csv.write_text("epoch,step,time_s,samples,train_loss\n1,5,0.5,320,2.5\n")
    shown = compared(*runs)
    assert choose_metric(shown.runs, None) == "val_accuracy"
    assert choose_metric(shown.runs[::-1], None) == "val_loss"


def test_more_runs_than_fit_are_said_to_be_left_out(make_run: MakeRun, folder: Path) -> None:
    for day in range(1, MAX_SHOWN + 3):
        make_run(f"run-{day:02}", day=day)
    make_run("lost").run_json.unlink()
    shown = compare(choose_runs([str(folder)]))
    assert [run.label for run in shown.runs] == [f"run-{day:02}" for day in range(3, 11)]
    lines = list(comparison_lines(shown, curve_tables(shown, "val_loss"), 60))
    assert max(len(line) for line in lines if str(folder) not in line) <= 60 + len(shown.left_out)
    assert any(line.startswith("Of 10 runs the 8 newest are shown") for line in lines)
    assert any(line.split() == ["result", "A", "B", "C", "D"] for line in lines)
    assert any(line.split() == ["result", "E", "F", "G", "H"] for line in lines)
    assert "No setting differs." in lines


def test_runs_are_found_by_their_names(
    make_run: MakeRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    first = make_run("digits-1", run={"settings": {"name": "base"}})
    second = make_run("digits-2")
    (a, b) = choose_runs(["base", "digits-2"])
    assert [a.report.path, b.report.path] == [first.path, second.path]
    second.notes_json.write_text(json.dumps({"name": "base"}))
    with pytest.raises(UsageError, match="2 runs are called 'base'"):
        choose_runs(["base", "digits-2"])
    begun = make_run("later-20260302-101500")
    begun.run_json.unlink()
    assert choose_run("later").path == begun.path  # where run.json, with the name, isn't there yet
    with pytest.raises(UsageError, match=r"no run below .* is called so"):
        choose_runs(["digits-1", "digits-3"])
    with pytest.raises(UsageError, match="1 run to compare: name at least two"):
        choose_runs(["digits-1", str(first.path)])
    with pytest.raises(UsageError, match="holds no training, and no folder in it does"):
        choose_runs([str(first.snapshots)])
    notes = folder.parent / "notes.md"
    notes.touch()
    with pytest.raises(UsageError, match="is a file: name the directory of a run"):
        choose_run(str(notes))


def test_a_running_one_is_compared_by_what_it_has(make_run: MakeRun) -> None:
    running, done = make_run("running", ended=None), make_run("done")
    change(done.summary_json, images_per_s=1.0)
    with running.lock():
        shown = compared(running, done)
    cells = {row.name: row.values for row in shown.figures}
    assert cells["state"] == ("running", "finished")
    assert cells["steps"] == (46, 46)
    assert cells["images/s"] == (pytest.approx(8011.42307), 1.0)
