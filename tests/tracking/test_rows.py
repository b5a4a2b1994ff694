from pathlib import Path

from paceline.tracking.rows import Cursor, NewRows, describe, ending_of, summary_of
from tests.tracking.runs import begun, ended, epoch, step, truncate


def test_rows_come_once_in_order_of_steps(tmp_path: Path) -> None:
    run = begun(tmp_path)
    rows = NewRows(run, Cursor())
    assert rows.read() == []
    step(run, 2, 0.9)
    step(run, 4, 0.8)
    epoch(run, 1, 0.85)
    first = rows.read()
    assert [(row.step, row.epoch) for row in first] == [(2, None), (4, None), (4, 1)]
    assert first[0].figures == {
        "progress/epoch": 1.0,
        "progress/time_s": 2.25,
        "progress/samples": 128.0,
        "train/loss": 0.9,
        "train/lr": 0.1,
    }
    # The mean of an epoch is another curve than that of its steps; validation has one alone.
    assert first[2].figures["epoch/train_loss"] == 0.85
    assert first[2].figures["epoch/lr"] == 0.1
    assert first[2].figures["val/accuracy"] == 0.1
    assert first[2].figures["speed"] == 100.0
    assert rows.read() == []
    step(run, 6, 0.7)
    assert [row.step for row in rows.read()] == [6]


def test_a_row_that_is_being_written_comes_when_it_is_whole(tmp_path: Path) -> None:
    run = begun(tmp_path)
    rows = NewRows(run, Cursor())
    with run.steps_csv.open("a") as file:
        file.write("1,2,2.25,128,0.")
        file.flush()
        assert rows.read() == []
        file.write("5,0.1\n")
    (row,) = rows.read()
    assert row.figures["train/loss"] == 0.5


def test_what_is_no_number_is_left_out(tmp_path: Path) -> None:
    run = begun(tmp_path)
    step(run, 2, 0.9)
    with run.metrics_csv.open("a") as file:
        file.write("1,4,1.5,nan,,0.1,x\nx,8,2.5,1,1,1,1\n")
    (_, row) = NewRows(run, Cursor()).read()
    assert row.figures == {"progress/epoch": 1.0, "progress/time_s": 1.5, "epoch/lr": 0.1}


def test_steps_that_are_trained_again_are_left_out(tmp_path: Path) -> None:
    run = begun(tmp_path)
    rows = NewRows(run, Cursor(step=4, epoch=1))
    for number in (2, 4):
        step(run, number, 0.9)
    epoch(run, 1, 0.85)
    assert rows.read() == []
    # A resume from step 2: the tables are shorter, and grow again.
    truncate(run, epochs=0, steps=1)
    assert rows.read() == []
    for number in (4, 6):
        step(run, number, 0.1)
    epoch(run, 1, 0.2)
    assert [(row.step, row.epoch) for row in rows.read()] == [(6, None)]


def test_what_the_tracker_has_lost_comes_again(tmp_path: Path) -> None:
    run = begun(tmp_path)
    for number in (2, 4, 6):
        step(run, number, 0.9)
    epoch(run, 1, 0.85)
    found = NewRows(run, Cursor(step=6, epoch=1), last_step=2).read()
    assert [(row.step, row.epoch) for row in found] == [(4, None), (4, 1), (6, None)]


def test_a_run_is_described_by_what_tells_it_from_others(tmp_path: Path) -> None:
    run = begun(tmp_path / "lively-run")
    info = describe(run, None)
    assert (info.name, info.project, info.is_project_given) == ("lively-run", "digits", False)
    assert info.config["epochs"] == 2
    assert info.config["dropout"] == 0.2
    assert info.config["world_size"] == 2
    assert "seed" not in info.config  # it is the default
    assert "tracker" not in info.config
    given = describe(run, "mine")
    assert (given.project, given.is_project_given) == ("mine", True)


def test_how_it_ended(tmp_path: Path) -> None:
    run = begun(tmp_path)
    assert (ending_of(run), summary_of(run)) == ("stopped", {})
    ended(run)
    assert ending_of(run) == "finished"
    assert summary_of(run)["best_val_accuracy"] > 0.9
    assert "recipe" not in summary_of(run)
    run.summary_json.write_text('{"stopped_because": "signal"}')
    assert ending_of(run) == "stopped"
    run.summary_json.unlink()
    (run.logs / "failure-rank-0.json").write_text('{"rank": 0, "message": "boom"}')
    assert ending_of(run) == "failed"
