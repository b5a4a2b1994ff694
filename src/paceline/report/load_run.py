"""Reads a run directory, whole or not, into one value that the page is made from.

Nothing here fails because a file is missing, torn or not what it should be; the page says so.
"""

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from paceline.launch.errors.failures import FailureKind, WorkerFailure, one_line, root_cause
from paceline.results.json_object import (
    JsonObject,
    entries,
    number,
    read_object,
    text,
    whole,
)
from paceline.results.metrics_table import STEPS, Metrics, read_metrics
from paceline.results.run_directory import RunDirectory, SampleUnit, sample_unit

_ATTEMPT = re.compile(r"attempt-(\d+)-")


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
    """A row an epoch."""
    steps: Metrics
    """Rows within the epochs."""
    summary: JsonObject
    """Empty while the training runs, and after a resume until it ends again."""
    failures: tuple[WorkerFailure, ...]
    """Of the newest attempt, the likely cause first."""
    earlier_failures: tuple[WorkerFailure, ...]
    """The cause of each attempt that was followed by a restart or a resume."""
    snapshots: tuple[SnapshotEntry, ...]
    locked: bool
    """A process owns the run directory: the training runs."""
    read_at: datetime
    """When all this was read, UTC."""
    epoch_at: datetime | None
    """When the newest row of metrics.csv was written; None where there is no such file."""
    problems: tuple[str, ...]
    """One sentence for each file that couldn't be read."""

    @property
    def unit(self) -> SampleUnit:
        """What the run's samples are called."""
        return sample_unit(self.run)

    @property
    def epochs_done(self) -> int:
        """Epochs by the summary, else those of the table."""
        done = whole(self.summary, "epochs")
        return len(self.metrics) if done is None else done

    def figure(self, name: str, column: str = "") -> float | None:
        """Give a figure of the summary, else the newest in the table's column of that name.

        Args:
            column: In the table, where it has another name.
        """
        value = number(self.summary, name)
        return self.metrics.last(column or name) if value is None else value


def read_run(run: RunDirectory, *, with_steps: bool = True) -> RunReport:
    """Read what there is of a run; blocks for a few small files only.

    Args:
        run: The run directory; any of its files may be missing or partial.
        with_steps: Whether to read the rows within the epochs, which may be many.
    """
    problems: list[str] = []
    description = read_object(run.run_json, problems, expected=True)
    since_s = _newest_start_s(description)
    summary = read_object(run.summary_json, problems) if _since(run.summary_json, since_s) else {}
    failures, earlier = _read_failures(run.logs, since_s, problems)
    if failures and not run.run_json.exists():
        problems = [f"nothing was trained: failed on {one_line(failures[0])}"]
    return RunReport(
        path=run.path,
        run=description,
        metrics=read_metrics(run.metrics_csv, problems),
        steps=read_metrics(run.steps_csv, problems, STEPS) if with_steps else Metrics(columns={}),
        summary=summary,
        failures=failures,
        earlier_failures=earlier,
        snapshots=_list_snapshots(run.snapshots, problems),
        locked=run.is_locked(),
        read_at=datetime.now(UTC),
        epoch_at=_written_at(run.metrics_csv),
        problems=tuple(problems),
    )


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


def _written_at(path: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(path.stat().st_mtime, UTC)
    except (OSError, OverflowError, ValueError):
        return None


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
