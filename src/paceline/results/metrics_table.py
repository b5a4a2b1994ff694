"""`metrics.csv`, a row an epoch, and `steps.csv`, rows within the epochs."""

import csv
import errno
import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path

from paceline.errors import UsageError
from paceline.files import open_plain, read_plain, write_atomic
from paceline.results.json_object import read_text


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """One epoch's figures over all workers; None where a figure has no meaning.

    Flat, since each field is a column of `metrics.csv`.
    """

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


@dataclass(frozen=True, kw_only=True)
class StepRow:
    """Figures over all workers of the steps since the row before; None where they have no meaning.

    The row before is of the same epoch; the first row of an epoch is about all its steps so far.
    """

    epoch: int
    """Counted from 1."""
    step: int
    """Optimizer steps since the start of the training."""
    time_s: float
    """Training time so far, evaluation and snapshots included, interruptions not."""
    samples: int | None = None
    """Training samples so far, over all epochs."""
    train_loss: float | None = None
    """Mean over the samples since the row before."""
    train_accuracy: float | None = None
    lr: float = 0.0
    """Learning rate of the last step."""
    images_per_s: float | None = None
    """Training samples a second over all workers, evaluation not counted."""
    exposed_comm: float | None = None
    """Share of the steps' time in which the slowest worker waited for communication; of several
    workers."""
    waiting: float | None = None
    """Share in which the workers waited for the slowest, on average."""


TABLE_MAX_BYTES = 64 << 20
"""A table of 250,000 epochs, or 600,000 rows within epochs; no more is written or read."""
_COUNT = re.compile(r"[0-9]{1,15}")
COLUMNS = tuple(f.name for f in fields(EpochRow) if f.name != "extra")


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """Columns and key of one of the tables."""

    key: str
    """The column that has another number in each row, in ascending order."""
    columns: tuple[str, ...]
    """Those of each such table; there may be more."""


EPOCHS = TableFormat(key="epoch", columns=COLUMNS)
"""Of `metrics.csv`."""
STEPS = TableFormat(key="step", columns=tuple(f.name for f in fields(StepRow)))
"""Of `steps.csv`."""

Cells = Mapping[str, str]
"""A row as it is written, by column."""


@dataclass(frozen=True, kw_only=True)
class Begun:
    """Outcome of opening a table on resuming: earlier rows that were rebuilt, and missing ones."""

    rebuilt: int
    """Rows that were missing or damaged, and came back from a snapshot."""
    missing: int
    """Epochs (or steps) without a row."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """A table by columns; one value a row, NaN for an empty cell."""

    columns: Mapping[str, tuple[float, ...]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def column(self, name: str) -> tuple[float, ...]:
        """Give a column's values; all NaN where the file has no such column."""
        return self.columns.get(name, (math.nan,) * len(self))

    def has(self, name: str) -> bool:
        """Say whether a column holds at least one number."""
        return any(not math.isnan(value) for value in self.column(name))

    def last(self, name: str) -> float | None:
        """Give the newest number of a column, or None where there is none."""
        numbers = [value for value in self.column(name) if not math.isnan(value)]
        return numbers[-1] if numbers else None


Validated = tuple[float | None, float | None]
"""Loss and accuracy of an epoch on the validation set; None where they aren't known or finite."""


def is_better(result: Validated, best: Validated, best_by: str) -> bool:
    """Tell whether a validation result is better than the best before it.

    The accuracy counts; of equal ones the lower loss, then the earlier epoch. The loss counts alone
    where `best_by` is `val_loss`, or there is no accuracy.
    """
    (loss, accuracy), (best_loss, best_accuracy) = result, best
    if loss is None:  # not finite, or a script gives the accuracy alone
        if accuracy is None or best_loss is not None or best_by == "val_loss":
            return False
        return best_accuracy is None or accuracy > best_accuracy
    lower_loss = best_loss is None or loss < best_loss
    if best_by == "val_loss" or accuracy is None:
        return lower_loss
    if best_accuracy is None or accuracy != best_accuracy:
        return best_accuracy is None or accuracy > best_accuracy
    return lower_loss


def best_row(table: Metrics, best_by: str) -> int | None:
    """Find the row of the best epoch, as the training that wrote them did; None without results."""
    best: Validated = (None, None)
    position = None
    pairs = zip(table.column("val_loss"), table.column("val_accuracy"), strict=True)
    for place, (loss, accuracy) in enumerate(pairs):
        figures = (None if math.isnan(loss) else loss, None if math.isnan(accuracy) else accuracy)
        if is_better(figures, best, best_by):
            position, best = place, figures
    return position


def start_table(
    path: Path, completed: int, saved: Iterable[Cells] = (), table: TableFormat = EPOCHS
) -> Begun:
    """Prepare a table: the header, and the rows of what a resumed training has behind it.

    Rows beyond `completed` (they will be trained again) and a row that a crash cut short are
    dropped: a power cut may leave less of the table than of the snapshots, or zeros.

    Args:
        completed: How many epochs (or steps) the training has behind it.
        saved: Their rows, as the snapshot has them; they count before those of the table.
    """
    present = {key: row for row in read_table(path, table) if (key := int(row[table.key]))}
    known = {int(row[table.key]): row for row in saved if _has_key(row, table)}
    # The snapshot's rows count before the table's, which a crash may have damaged.
    rebuilt = [key for key, row in known.items() if not _holds(present.get(key), row)]
    # In order, and none of those that are trained again.
    kept = dict(sorted((present | {key: known[key] for key in rebuilt}).items()))
    rows = [row for key, row in kept.items() if key <= completed]
    write_atomic(path, _text(rows, _columns(rows, table), header=True).encode())
    return Begun(rebuilt=len(rebuilt), missing=max(0, completed - len(rows)))


def _holds(cells: Cells | None, row: Cells) -> bool:
    return cells is not None and all(cells.get(name, "") == cell for name, cell in row.items())


def cells_of(row: EpochRow | StepRow) -> Cells:
    """Give a row as it is written."""
    listed = STEPS.columns if isinstance(row, StepRow) else COLUMNS
    own = {name: _cell(getattr(row, name)) for name in listed}
    extra = {} if isinstance(row, StepRow) else row.extra
    return own | {name: _cell(value) for name, value in extra.items()}


def append_rows(
    path: Path, new: Sequence[Cells], *, synced: bool = False, table: TableFormat = EPOCHS
) -> None:
    """Add rows, all of them or none.

    Args:
        synced: Wait until they, and all before them, survive a power cut.

    Raises:
        OSError: The disk is full, or the table as large as it may get; it is as it was.
    """
    with open_plain(path) as file:
        header = file.readline(TABLE_MAX_BYTES).decode(errors="replace")
    columns = next(csv.reader([header]), list(table.columns))
    # A new column changes every row: the table is written anew.
    if any(name not in columns for row in new for name in row):
        everything = [*read_table(path, table), *new]
        write_atomic(path, _text(everything, _columns(everything, table), header=True).encode())
        return
    content = _text(new, columns).encode()
    with path.open("ab") as file:
        # Appended; a full disk mustn't leave half a row.
        before = file.tell()
        if before + len(content) > TABLE_MAX_BYTES:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG), str(path))
        try:
            file.write(content)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def read_table(path: Path, table: TableFormat = EPOCHS) -> list[Mapping[str, str]]:
    """Read the complete rows; none where the file doesn't exist."""
    try:
        content = read_plain(path, TABLE_MAX_BYTES)
    except FileNotFoundError:
        return []
    except ValueError as error:
        raise UsageError(
            f"{path} can't be read: {error}. Move it out of the way: the training goes on without "
            f"the {table.key}s that it holds"
        ) from error
    rows = parse_rows(content.decode(errors="replace"))
    width = max(map(len, rows), default=0)
    return [row for row in rows if len(row) == width and _has_key(row, table)]


def _has_key(row: Cells, table: TableFormat) -> bool:
    return _COUNT.fullmatch(row.get(table.key, "")) is not None


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


def parse_metrics(content: str, table: TableFormat = EPOCHS) -> Metrics:
    """Read the text of a table that may be growing or torn.

    A last line without its end is dropped, so is a row without its epoch (or step); of two rows for
    one the later one counts. What isn't a finite number becomes NaN.
    """
    # A later row replaces an earlier one of the same epoch.
    rows = {_figure(row.get(table.key)): row for row in parse_rows(content)}
    ordered = [rows[key] for key in sorted(filter(math.isfinite, rows))]
    names = dict.fromkeys(name for row in ordered for name in row)
    return Metrics(columns={n: tuple(_figure(row.get(n)) for row in ordered) for n in names})


def read_metrics(path: Path, problems: list[str], table: TableFormat = EPOCHS) -> Metrics:
    """Read a table by columns, whole or not; see `parse_metrics`.

    Args:
        problems: Gets a sentence where the file can't be read.
    """
    return parse_metrics(read_text(path, problems, TABLE_MAX_BYTES), table)


def _columns(rows: Iterable[Mapping[str, str]], table: TableFormat) -> list[str]:
    """Name the usual columns and those that some row has besides, in order of appearance."""
    return list(dict.fromkeys([*table.columns, *(name for row in rows for name in row)]))


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


def _figure(value: str | None) -> float:
    try:
        number = float(value or "nan")
    except (TypeError, ValueError):
        return math.nan
    return number if math.isfinite(number) else math.nan
