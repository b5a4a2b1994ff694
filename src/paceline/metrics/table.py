"""`metrics.csv`: a row an epoch."""

import csv
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from paceline.config.files import write_atomic


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """One epoch's figures over all workers; None where a figure has no meaning."""

    epoch: int
    """Counted from 1."""
    step: int
    """Optimizer steps since the start of the training."""
    time_s: float
    """Training time so far, evaluation and snapshots included, interruptions not."""
    train_loss: float | None = None
    train_accuracy: float | None = None
    train_top5_accuracy: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None
    val_top5_accuracy: float | None = None
    lr: float = 0.0
    """Learning rate of the epoch's last step."""
    images_per_s: float = 0.0
    """Training samples a second over all workers, evaluation not counted."""
    batch_time_s: float = 0.0
    """Mean time of a step, data included."""
    data_time_s: float = 0.0
    """Mean time a step waited for its data, of the slowest worker."""


COLUMNS = tuple(field.name for field in fields(EpochRow))


def start_table(path: Path, completed_epochs: int) -> None:
    """Prepare the table: the header, and the rows of epochs that a resumed training has behind it.

    Rows beyond `completed_epochs` (they will be trained again) and a row that a crash cut short
    are dropped.
    """
    kept = [row for row in read_table(path) if int(row["epoch"]) <= completed_epochs]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(kept)
    write_atomic(path, text.getvalue().encode())


def append_rows(path: Path, rows: Iterable[EpochRow]) -> None:
    """Add rows, all of them or none.

    Raises:
        OSError: The disk is full; the table is as it was.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writerows({name: _cell(getattr(row, name)) for name in COLUMNS} for row in rows)
    with path.open("ab") as file:
        before = file.tell()
        try:
            file.write(text.getvalue().encode())
            file.flush()
        except OSError:
            file.truncate(before)
            raise


def read_table(path: Path) -> list[Mapping[str, str]]:
    """Read the complete rows; none where the file doesn't exist."""
    if not path.exists():
        return []
    text = path.read_text(errors="replace")
    complete = text[: text.rfind("\n") + 1]  # a crash may have cut the last row anywhere
    rows = list(csv.DictReader(io.StringIO(complete)))
    return [r for r in rows if None not in r.values() and r.get("epoch", "").isdecimal()]


def _cell(value: float | int | None) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return str(value) if isinstance(value, int) else f"{value:.9g}"
