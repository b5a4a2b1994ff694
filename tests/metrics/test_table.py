import csv
import math
from pathlib import Path

import pytest

from paceline.metrics.table import COLUMNS, EpochRow, append_rows, read_table, start_table

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
        append_rows(path, [row(epoch, train_loss=1 / 3, val_accuracy=0.5)])
    return path


def test_columns_are_the_contract(table: Path) -> None:
    assert ",".join(COLUMNS) == CONTRACT
    assert table.read_text().splitlines()[0] == CONTRACT


def test_figures_without_a_meaning_are_empty_cells(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    start_table(path, 0)
    append_rows(path, [row(1, train_loss=0.25, val_loss=math.nan, val_accuracy=1.0)])
    (read,) = read_table(path)
    assert read["train_loss"] == "0.25"
    assert [read[name] for name in ("train_accuracy", "val_loss", "val_top5_accuracy")] == [""] * 3
    assert (read["epoch"], read["step"], read["val_accuracy"]) == ("1", "10", "1")


def test_resuming_keeps_the_rows_of_complete_epochs(table: Path) -> None:
    before = table.read_text().splitlines()
    start_table(table, completed_epochs=2)
    assert table.read_text().splitlines() == before[:3]
    start_table(table, completed_epochs=0)
    assert table.read_text().splitlines() == before[:1]


@pytest.mark.parametrize("cut", [1, 2, 10, 25])
def test_a_row_that_a_crash_cut_short_is_dropped(table: Path, cut: int) -> None:
    whole = table.read_bytes()
    table.write_bytes(whole[:-cut])
    assert [r["epoch"] for r in read_table(table)] == ["1", "2"]
    start_table(table, completed_epochs=3)
    append_rows(table, [row(3)])
    with table.open(newline="") as file:
        assert [r["epoch"] for r in csv.DictReader(file)] == ["1", "2", "3"]


def test_rows_that_lack_cells_are_dropped_wherever_they_stand(table: Path) -> None:
    header, first, *rest = table.read_text().splitlines(keepends=True)
    table.write_text("".join([header, first[:7] + "\n", "\0\n", *rest]))
    assert [r["epoch"] for r in read_table(table)] == ["2", "3"]


def test_no_table_has_no_rows(tmp_path: Path) -> None:
    assert read_table(tmp_path / "absent.csv") == []
