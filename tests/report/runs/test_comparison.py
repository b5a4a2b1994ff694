"""Runs side by side: what differs, how each ended, and their curves over each other."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.options.figures import NOTHING
from paceline.report.runs.comparison import (
    Comparison,
    choose_runs,
    compare,
    comparison_lines,
    write_comparison,
)
from paceline.results.find_runs import choose_run
from paceline.results.run_directory import RunDirectory
from tests.report.runs.conftest import MakeRun, change


def compared(*runs: RunDirectory) -> Comparison:
    return compare(choose_runs([str(run.path) for run in runs]))


def settings(shown: Comparison) -> dict[str, tuple[str, ...]]:
    return {row.label: row.cells for row in shown.settings}


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
        "shift": ("1", "4"),
        "lr": ("0.05", "0.1"),
        "workers": ("2", "4"),
        "torch": ("2.15.0", "2.16.0"),
        "hosts": ("node-1, CPU (x86_64, AVX512)", "node-2, CPU"),
    }
    same = compared(first, make_run("c"))
    assert settings(same) == {}
    lines = list(comparison_lines(same))
    assert "No setting differs." in lines
    assert any(line.split() == ["result", "A", "B"] for line in lines)


def test_what_was_left_open_counts_as_what_it_came_to(make_run: MakeRun) -> None:
    first = make_run("a", run={"settings": {"global_batch": None}})
    second = make_run("b")
    third = make_run("c", run={"settings": {"global_batch": None}, "derived": {"global_batch": 8}})
    assert settings(compared(first, second, third)) == {"global-batch": ("64", "64", "8")}


def test_what_a_script_has_not_is_no_setting_of_it(make_run: MakeRun) -> None:
    words = ["--lr", "0.3", "my data"]
    script = {"kind": "script", "script_args": words, "settings": {"lr": 0.1, "epochs": 2}}
    recipe = {"settings": {"epochs": 3}}
    shown = settings(compared(make_run("a", run=recipe), make_run("b", run=script)))
    assert shown["lr"] == ("0.05", NOTHING)
    assert shown["momentum"][1] == NOTHING
    assert shown["epochs"] == ("3", "2")
    assert shown["script arguments"] == (NOTHING, "--lr 0.3 'my data'")


def test_runs_of_other_figures_leave_cells_empty(make_run: MakeRun) -> None:
    usual = make_run("recipe")
    script = make_run(
        "script",
        run={"kind": "script", "recipe": "train.py", "recipe_arguments": {}},
        summary={"val_accuracy": None, "val_loss": None, "figures": {"val_bleu": 31.25}},
    )
    write_metrics(script, "epoch", "step", "time_s", "val_bleu", rows=[(1, 10, 1.0, 31.25)])
    shown = compared(usual, script)
    cells = {row.label: row.cells for row in shown.figures}
    assert cells["best accuracy"] == ("94.65 %", NOTHING)
    assert cells["val_bleu"] == (NOTHING, "31.25")


def test_what_was_recorded_within_epochs_counts_first(make_run: MakeRun) -> None:
    stopped, usual = make_run("stopped", ended="signal"), make_run("usual")
    stopped.metrics_csv.unlink()
    change(stopped.summary_json, train_loss=None, steps=None, train_time_s=None)
    stopped.steps_csv.write_text(
        "epoch,step,time_s,samples,train_loss,lr\n1,5,0.5,320,2.5,0.1\n1,9,1.5,576,2.0,0.1\n"
    )
    shown = compared(stopped, usual)
    values = {row.label: row.cells[0] for row in shown.figures}
    assert values["training loss"] == "2.0000"
    assert (values["steps"], values["training time"]) == ("9", "1.5 s")
    page = write_comparison(shown, stopped.path.parent / "page.html").read_text()
    assert "Training loss. A: from 2.5 to 2; B: from 2.105 to 1.001" in page


def test_counts_are_grouped_and_settings_have_the_names_of_the_help(make_run: MakeRun) -> None:
    small = {"settings": {"patience": 1}, "derived": {"parameters": 1234}}
    large = {"settings": {"patience": 3}, "derived": {"parameters": 5678901}}
    shown = compared(make_run("a", run=small), make_run("b", run=large))
    assert {row.label: row.cells for row in shown.settings} == {
        "patience": ("1", "3"),
        "parameters": ("1,234", "5,678,901"),
    }


def test_runs_are_found_by_their_names(
    make_run: MakeRun, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    first = make_run("digits-1", run={"settings": {"name": "base"}})
    second = make_run("digits-2")
    (a, b) = choose_runs(["base", "digits-2"])
    assert [a.report.path, b.report.path] == [first.path, second.path]
    change(second.run_json, settings={"name": "base"})
    with pytest.raises(UsageError, match="2 runs are called 'base'"):
        choose_runs(["base", "digits-2"])
    begun = make_run("later-20260302-101500")
    begun.run_json.unlink()
    assert choose_run("later").path == begun.path  # where run.json, with the name, isn't there yet
    with pytest.raises(UsageError, match=r"no run below .* is called so"):
        choose_runs(["digits-1", "digits-3"])
    with pytest.raises(UsageError, match="1 run to compare: name 2 to 26"):
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
    cells = {row.label: row.cells for row in shown.figures}
    assert cells["state"] == ("running", "finished")
    assert cells["steps"] == ("46", "46")
    assert cells["images/s"] == ("8,011", "1.0")
