"""`metrics.csv`: a row an epoch."""

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from paceline.config.files import read_plain, write_atomic
from paceline.errors import UsageError


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
    exposed_comm: float | None = None
    """Share of the steps' time in which the slowest worker waited for communication; of several
    workers."""
    waiting: float | None = None
    """Share in which the workers waited for the slowest, on average."""
    wire_bytes_per_step: float | None = None
    """What one worker sends in a step."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """Figures of the script's own; each becomes one more column."""


TABLE_MAX_BYTES = 64 << 20
"""A table of 250,000 epochs."""
_EPOCH = re.compile(r"[0-9]{1,15}")
COLUMNS = tuple(f.name for f in fields(EpochRow) if f.name != "extra")


def start_table(path: Path, completed_epochs: int) -> None:
    """Prepare the table: the header, and the rows of epochs that a resumed training has behind it.

    Rows beyond `completed_epochs` (they will be trained again) and a row that a crash cut short
    are dropped.
    """
    kept = [row for row in read_table(path) if int(row["epoch"]) <= completed_epochs]
    write_atomic(path, _text(kept, _columns(kept), header=True).encode())


def append_rows(path: Path, rows: Iterable[EpochRow]) -> None:
    """Add rows, all of them or none.

    Raises:
        OSError: The disk is full; the table is as it was.
    """
    new = [
        {name: _cell(getattr(row, name)) for name in COLUMNS}
        | {name: _cell(value) for name, value in row.extra.items()}
        for row in rows
    ]
    first = read_plain(path, TABLE_MAX_BYTES).partition(b"\n")[0].decode(errors="replace")
    columns = next(csv.reader([first]), list(COLUMNS))
    if any(name not in columns for row in new for name in row):
        everything = [*read_table(path), *new]
        write_atomic(path, _text(everything, _columns(everything), header=True).encode())
        return
    with path.open("ab") as file:
        before = file.tell()
        try:
            file.write(_text(new, columns).encode())
            file.flush()
        except OSError:
            file.truncate(before)
            raise


def read_table(path: Path) -> list[Mapping[str, str]]:
    """Read the complete rows; none where the file doesn't exist."""
    try:
        content = read_plain(path, TABLE_MAX_BYTES)
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise UsageError(
            f"{path} can't be read: {error}. Move it out of the way: the training goes on without "
            "the epochs that it holds"
        ) from error
    rows = parse_rows(content.decode(errors="replace"))
    width = max(map(len, rows), default=0)
    return [r for r in rows if len(r) == width and _EPOCH.fullmatch(r.get("epoch", ""))]


def parse_rows(text: str) -> list[Mapping[str, str]]:
    """Read the text of a table that may be growing or torn, without its unfinished last line.

    Returns:
        The rows by column, without cells that a row lacks or that have no column.
    """
    complete = text[: text.rfind("\n") + 1]  # a crash may have cut the last row anywhere
    rows: list[Mapping[str, str]] = []
    with suppress(csv.Error):  # an overlong field: the rows before it stand
        for row in csv.DictReader(io.StringIO(complete.replace("\0", ""), newline="")):
            rows.append({k: v for k, v in row.items() if k and isinstance(v, str)})
    return rows


def _columns(rows: Iterable[Mapping[str, str]]) -> list[str]:
    """Name the usual columns and those that some row has besides, in order of appearance."""
    return list(dict.fromkeys([*COLUMNS, *(name for row in rows for name in row)]))


def _text(
    rows: Iterable[Mapping[str, str]], columns: Sequence[str], *, header: bool = False
) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _cell(value: float | int | None) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return str(value) if isinstance(value, int) else f"{value:.9g}"
