import csv
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.results import metrics_table
from paceline.results.metrics_table import (
    COLUMNS,
    STEPS,
    Begun,
    EpochRow,
    StepRow,
    append_rows,
    cells_of,
    parse_metrics,
    read_table,
    start_table,
)

CONTRACT = (
    "epoch,step,time_s,train_loss,train_accuracy,train_top5_accuracy,"
    "val_loss,val_accuracy,val_top5_accuracy,lr,images_per_s,batch_time_s,data_time_s,"
    "exposed_comm,waiting,wire_bytes_per_step"
)


def row(epoch: int, **more: float | None) -> EpochRow:
    return EpochRow(epoch=epoch, step=10 * epoch, time_s=1.5 * epoch, **more)  # type: ignore[arg-type]


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.csv"
    start_table(path, 0)
    for epoch in (1, 2, 3):
        append_rows(path, [cells_of(row(epoch, train_loss=1 / 3, val_accuracy=0.5))])
    return path


def test_columns_are_the_contract(table: Path) -> None:
    assert ",".join(COLUMNS) == CONTRACT
    assert table.read_text().splitlines()[0] == CONTRACT


def test_figures_without_a_meaning_are_empty_cells(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    start_table(path, 0)
    append_rows(path, [cells_of(row(1, train_loss=0.25, val_loss=math.nan, val_accuracy=1.0))])
    (read,) = read_table(path)
    assert read["train_loss"] == "0.25"
    assert [read[name] for name in ("train_accuracy", "val_loss", "val_top5_accuracy")] == [""] * 3
    assert (read["epoch"], read["step"], read["val_accuracy"]) == ("1", "10", "1")


def test_resuming_keeps_the_rows_of_complete_epochs(table: Path) -> None:
    before = table.read_text().splitlines()
    start_table(table, completed=2)
    assert table.read_text().splitlines() == before[:3]
    start_table(table, completed=0)
    assert table.read_text().splitlines() == before[:1]


def _zeroed(content: bytes, start: int) -> bytes:
    return content[:start] + bytes(len(content) - start)


_DAMAGED: dict[str, Callable[[bytes], bytes]] = {
    "zeros": lambda content: _zeroed(content, 0),
    "zeros from the second row": lambda content: _zeroed(content, content.index(b"\n2,") + 1),
    "nothing": lambda content: b"",
    "torn": lambda content: content[: content.index(b"\n2,") + 9],
    "a digit": lambda content: content.replace(b"\n2,20,", b"\n2,21,"),
    "two rows in one": lambda content: content.replace(b"\n2,", b"2,"),
    "other": lambda content: b"\xff\x00,\n9" * 50,
}


@pytest.mark.parametrize("how", [*_DAMAGED, "gone"])
def test_rows_that_a_power_cut_has_cost_come_back(table: Path, how: str) -> None:
    before = table.read_bytes()
    saved = read_table(table)
    if how == "gone":
        table.unlink()
    else:
        table.write_bytes(_DAMAGED[how](before))
    begun = start_table(table, 3, saved)
    assert begun.rebuilt in (1, 2, 3)
    assert begun.missing == 0
    found = [{name: row[name] for name in COLUMNS} for row in read_table(table)]
    assert found == saved
    assert start_table(table, 3, saved) == Begun(rebuilt=0, missing=0)


def test_rows_without_damage_stay_and_those_that_are_nowhere_are_counted(table: Path) -> None:
    saved = read_table(table)
    before = table.read_bytes()
    assert start_table(table, 3, saved) == Begun(rebuilt=0, missing=0)
    assert table.read_bytes() == before
    table.unlink()
    assert start_table(table, 3, saved[1:]) == Begun(rebuilt=2, missing=1)
    assert start_table(table, 1, [{"epoch": "9" * 5000}, {}]) == Begun(rebuilt=0, missing=1)


@pytest.mark.parametrize("cut", [1, 2, 10, 25])
def test_a_row_that_a_crash_cut_short_is_dropped(table: Path, cut: int) -> None:
    whole = table.read_bytes()
    table.write_bytes(whole[:-cut])
    assert [r["epoch"] for r in read_table(table)] == ["1", "2"]
    start_table(table, completed=3)
    append_rows(table, [cells_of(row(3))])
    with table.open(newline="") as file:
        assert [r["epoch"] for r in csv.DictReader(file)] == ["1", "2", "3"]


def test_rows_that_lack_cells_are_dropped_wherever_they_stand(table: Path) -> None:
    header, first, *rest = table.read_text().splitlines(keepends=True)
    table.write_text("".join([header, first[:7] + "\n", "\0\n", *rest]))
    assert [r["epoch"] for r in read_table(table)] == ["2", "3"]


def test_no_table_has_no_rows(tmp_path: Path) -> None:
    assert read_table(tmp_path / "absent.csv") == []


def test_a_row_being_written_is_left_out() -> None:
    metrics = parse_metrics("epoch,val_loss\n1,0.5\n2,0.4\n3,0.")
    assert metrics.column("epoch") == (1, 2)


def test_cells_that_hold_no_number_are_nan() -> None:
    metrics = parse_metrics("epoch,val_loss,lr\n1,,0.1\n2,nan\n3,inf,x\n4,0.25,0.2,surplus\n,1,1\n")
    assert metrics.column("epoch") == (1, 2, 3, 4)
    assert [math.isnan(v) for v in metrics.column("val_loss")] == [True, True, True, False]
    assert metrics.last("lr") == 0.2
    assert not metrics.has("missing")


def test_the_later_row_of_an_epoch_counts() -> None:
    metrics = parse_metrics("epoch,val_loss\n1,0.5\n2,0.4\n2,0.3\n")
    assert metrics.column("val_loss") == (0.5, 0.3)


@pytest.mark.parametrize("content", ["", "\n", "epoch\n", "a\0b\n1\n", '"epoch\n1\n2', "\n\n\n"])
def test_files_without_rows(content: str) -> None:
    assert len(parse_metrics(content)) == 0


def step_row(step: int, **more: float | None) -> StepRow:
    return StepRow(epoch=1, step=step, time_s=0.1 * step, samples=8 * step, **more)  # type: ignore[arg-type]


@pytest.fixture
def steps(tmp_path: Path) -> Path:
    path = tmp_path / "steps.csv"
    start_table(path, 0, table=STEPS)
    for step in (1, 10, 20):
        append_rows(path, [cells_of(step_row(step, train_loss=1 / step))], table=STEPS)
    return path


def test_the_columns_within_an_epoch_are_the_contract(steps: Path) -> None:
    header = steps.read_text().splitlines()[0]
    assert header == (
        "epoch,step,time_s,samples,train_loss,train_accuracy,lr,images_per_s,exposed_comm,waiting"
    )
    assert parse_metrics(steps.read_text(), STEPS).column("train_loss") == (1.0, 0.1, 0.05)


def test_rows_within_an_epoch_are_kept_by_their_steps(steps: Path) -> None:
    before = steps.read_text().splitlines()
    start_table(steps, 19, table=STEPS)
    assert steps.read_text().splitlines() == before[:3]


@pytest.mark.parametrize("how", [*_DAMAGED, "gone"])
def test_a_damaged_table_of_steps_goes_on_with_what_is_whole(steps: Path, how: str) -> None:
    before = steps.read_bytes()
    if how == "gone":
        steps.unlink()
    else:
        steps.write_bytes(_DAMAGED[how](before.replace(b"\n1,10,", b"\n2,20,")))
    start_table(steps, 20, table=STEPS)
    append_rows(steps, [cells_of(step_row(30))], table=STEPS)
    found = read_table(steps, STEPS)
    assert found[-1]["step"] == "30"
    assert all(row.keys() == set(STEPS.columns) for row in found)
    assert len({row["step"] for row in found}) == len(found)


def test_a_table_grows_no_larger_than_it_can_be_read(
    steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = steps.read_bytes()
    monkeypatch.setattr(metrics_table, "TABLE_MAX_BYTES", len(before) + 10)
    with pytest.raises(OSError, match="File too large"):
        append_rows(steps, [cells_of(step_row(30))], table=STEPS)
    assert steps.read_bytes() == before
    assert len(read_table(steps, STEPS)) == 3
