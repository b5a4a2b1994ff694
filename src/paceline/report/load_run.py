"""Reads a run directory, whole or not, into one value that the page is made from.

Nothing here fails because a file is missing, torn or not what it should be; the page says so.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from paceline.files import JSON_MAX_BYTES, parse_json, read_plain, why_unreadable
from paceline.launch.failures import FailureKind, WorkerFailure, root_cause
from paceline.metrics.table import TABLE_MAX_BYTES, parse_rows
from paceline.results.run_directory import RunDirectory

JsonObject = Mapping[str, object]
"""A JSON object as read: values of any JSON type."""

_ATTEMPT = re.compile(r"attempt-(\d+)-")


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """`metrics.csv` by columns; one value an epoch, NaN for an empty cell."""

    columns: Mapping[str, tuple[float, ...]]

    def __len__(self) -> int:
        return len(self.columns.get("epoch", ()))

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


@dataclass(frozen=True, kw_only=True)
class SnapshotEntry:
    """One directory under `snapshots/`."""

    name: str
    best: bool
    damaged: bool


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """All that is known about a run; empty parts where a file is missing."""

    path: Path
    run: JsonObject
    metrics: Metrics
    summary: JsonObject
    """Empty while the training runs, and after a resume until it ends again."""
    failures: tuple[WorkerFailure, ...]
    """Of the newest attempt, the likely cause first."""
    earlier_failures: tuple[WorkerFailure, ...]
    """The cause of each attempt that was followed by a restart or a resume."""
    snapshots: tuple[SnapshotEntry, ...]
    locked: bool
    """A process owns the run directory: the training runs."""
    problems: tuple[str, ...]
    """One sentence for each file that couldn't be read."""


def number(source: JsonObject, name: str) -> float | None:
    """Read a finite number, or None where there is none."""
    value = source.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def whole(source: JsonObject, name: str) -> int | None:
    """Read a number as an integer, or None where there is none."""
    value = number(source, name)
    return None if value is None else int(value)


def text(source: JsonObject, name: str) -> str:
    """Read a value as text; empty where there is none."""
    value = source.get(name)
    return "" if value is None else str(value)


def section(source: JsonObject, name: str) -> JsonObject:
    """Read a nested object; empty where there is none."""
    value = source.get(name)
    return value if isinstance(value, dict) else {}


def entries(source: JsonObject, name: str) -> list[JsonObject]:
    """Read a list of objects, leaving out what isn't one."""
    value = source.get(name)
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def parse_metrics(content: str) -> Metrics:
    """Read the text of a `metrics.csv` that may be growing or torn.

    A last line without its end is dropped, so is a row without an epoch; of two rows for one epoch
    the later one counts. What isn't a finite number becomes NaN.
    """
    rows = {_cell(row.get("epoch")): row for row in parse_rows(content)}
    ordered = [rows[epoch] for epoch in sorted(filter(math.isfinite, rows))]
    names = dict.fromkeys(name for row in ordered for name in row)
    return Metrics(columns={n: tuple(_cell(row.get(n)) for row in ordered) for n in names})


def read_run(run: RunDirectory) -> RunReport:
    """Read what there is of a run; blocks for a few small files only.

    Args:
        run: The run directory; any of its files may be missing or partial.
    """
    problems: list[str] = []
    description = read_object(run.run_json, problems, expected=True)
    since_s = _newest_start_s(description)
    summary = read_object(run.summary_json, problems) if _since(run.summary_json, since_s) else {}
    failures, earlier = _read_failures(run.logs, since_s, problems)
    return RunReport(
        path=run.path,
        run=description,
        metrics=parse_metrics(_read_text(run.metrics_csv, problems, TABLE_MAX_BYTES)),
        summary=summary,
        failures=failures,
        earlier_failures=earlier,
        snapshots=_list_snapshots(run.snapshots, problems),
        locked=run.is_locked(),
        problems=tuple(problems),
    )


def _cell(value: str | None) -> float:
    try:
        found = float(value or "nan")
    except (TypeError, ValueError):
        return math.nan
    return found if math.isfinite(found) else math.nan


def _read_text(path: Path, problems: list[str], most_bytes: int = JSON_MAX_BYTES) -> str:
    try:
        return read_plain(path, most_bytes).decode(errors="replace")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} can't be read: {why_unreadable(error)}")
        return ""


def read_object(path: Path, problems: list[str], *, expected: bool = False) -> JsonObject:
    """Read a file that should hold a JSON object; empty where it doesn't, or isn't there.

    Args:
        path: The file.
        problems: Gets a sentence where the file can't be read.
        expected: Whether its absence is a problem.
    """
    content = _read_text(path, problems)
    if not content:
        if expected:
            problems.append(f"{path.name} is missing or empty")
        return {}
    try:
        parsed = parse_json(content)
    except ValueError as error:
        problems.append(f"{path.name} isn't valid JSON: {error}")
        return {}
    if not isinstance(parsed, dict):
        problems.append(f"{path.name} should hold a JSON object")
        return {}
    return parsed


def _newest_start_s(description: JsonObject) -> float | None:
    """When the newest attempt began, in seconds since 1970; None where nothing says so."""
    starts = [text(entry, "started_at") for entry in entries(description, "history")]
    for start in reversed([text(description, "started_at"), *starts]):
        try:
            moment = datetime.fromisoformat(start)
        except ValueError:
            continue
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    return None


def _since(path: Path, since_s: float | None) -> bool:
    """Whether a file tells of the newest attempt: a resume leaves the files of the one before."""
    try:
        return since_s is None or path.stat().st_mtime >= since_s
    except OSError:
        return True


def _read_failures(
    logs: Path, since_s: float | None, problems: list[str]
) -> tuple[tuple[WorkerFailure, ...], tuple[WorkerFailure, ...]]:
    """Read the newest attempt's failures, cause first, and the cause of each attempt before it.

    Attempts that were followed by a restart have theirs under `attempt-<n>-failure-rank-<n>.json`.
    """
    groups: dict[int, list[WorkerFailure]] = {}
    newest: list[WorkerFailure] = []
    for path in sorted(logs.glob("*failure-rank-*.json")):
        record = read_object(path, problems)
        if not record:
            continue
        attempt = _ATTEMPT.match(path.name)
        if attempt is None and _since(path, since_s):
            newest.append(_failure(record))
        else:
            group = int(attempt[1]) if attempt else -1  # -1: left by the run before a resume
            groups.setdefault(group, []).append(_failure(record))
    return root_cause(newest), tuple(root_cause(groups[n])[0] for n in sorted(groups))


def _failure(record: JsonObject) -> WorkerFailure:
    kinds: dict[str, FailureKind] = {"usage": "usage", "job": "job"}
    return WorkerFailure(
        rank=whole(record, "rank") or 0,
        host=text(record, "host"),
        step=whole(record, "step"),
        exit_code=whole(record, "exit_code"),
        signal_name=text(record, "signal_name") or None,
        kind=kinds.get(text(record, "kind"), "infrastructure"),
        error_type=text(record, "error_type"),
        message=text(record, "message"),
        traceback=text(record, "traceback"),
        operation=text(record, "operation"),
        time_s=number(record, "time_s"),
    )


def _list_snapshots(directory: Path, problems: list[str]) -> tuple[SnapshotEntry, ...]:
    best = text(read_object(directory / "best.json", problems), "snapshot")
    try:
        names = sorted(item.name for item in directory.iterdir() if item.is_dir())
    except OSError:
        return ()
    return tuple(
        SnapshotEntry(name=name, best=name == best, damaged=name.endswith(".damaged"))
        for name in names
        if name.startswith("step-")
    )
