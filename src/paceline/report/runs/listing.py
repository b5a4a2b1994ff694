"""The runs below a folder: which is the newest, and all of them as a table or JSON."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from paceline.errors import UsageError
from paceline.options import figures
from paceline.options.command_line import note
from paceline.options.text import aligned, printable
from paceline.report.charts import best_position
from paceline.report.load_run import RunReport, read_run
from paceline.report.run_outcome import RunState, find_state
from paceline.results.find_runs import choose_run, find_runs, is_of_study
from paceline.results.json_object import entries, section, text, texts, whole
from paceline.results.run_directory import USUAL_FOLDER, RunDirectory, SampleUnit

ListedState = RunState | Literal["damaged"]

_UNLIMITED_EPOCHS = 100_000
"""From so many planned epochs on, something else ends the training."""
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """One run of a list."""

    label: str
    """Path below the folder that is listed."""
    report: RunReport
    state: ListedState
    best: float | None
    """Best validation figure, of the column `best_by`."""
    best_by: str

    @property
    def recipe(self) -> str:
        """Name of the recipe or script."""
        return text(self.report.run, "recipe")

    @property
    def planned_epochs(self) -> int | None:
        """What `--epochs` says; None where a script's own loop decides."""
        run = self.report.run
        is_script = text(run, "kind") == "script" and "epochs" not in texts(run, "given")
        return None if is_script else whole(section(run, "settings"), "epochs")

    @property
    def workers(self) -> int | None:
        """Number of workers of the newest start."""
        return whole(section(self.report.run, "derived"), "world_size")

    @property
    def started_at(self) -> datetime | None:
        """When the training was first started."""
        return _moment(text(self.report.run, "started_at"))

    @property
    def last_start_s(self) -> float:
        """When it was last started or resumed, in seconds since 1970; 0 where that isn't known."""
        starts = [text(start, "started_at") for start in entries(self.report.run, "history")]
        moments = [*map(_moment, starts), self.started_at]
        return max((moment.timestamp() for moment in moments if moment), default=0.0)

    def to_json(self) -> Mapping[str, object]:
        """Return the JSON object for other programs."""
        settings = section(self.report.run, "settings")
        return {
            "path": str(self.report.path),
            "name": text(settings, "name") or None,
            "tags": list(texts(settings, "tag")),
            "note": text(settings, "note") or None,
            "recipe": self.recipe or None,
            "kind": text(self.report.run, "kind") or None,
            "state": self.state,
            "best": self.best,
            "best_by": self.best_by if self.best is not None else None,
            "epochs": self.report.epochs_done,
            "planned_epochs": self.planned_epochs,
            "images_per_s": self.report.figure("images_per_s"),
            "workers": self.workers,
            "started_at": self.started_at.isoformat() if self.started_at else None,
            "problems": list(self.report.problems),
        }


@dataclass(frozen=True, kw_only=True)
class RunList:
    """The runs below a folder."""

    entries: tuple[RunEntry, ...]
    """Those started or resumed last come first."""
    whole: bool
    """Whether everything below the folder was looked at."""


def list_runs(root: Path) -> RunList:
    """List the runs below a folder; one that is damaged is listed with what is wrong.

    Args:
        root: The folder, an absolute path.
    """
    found = find_runs(root)
    listed = [
        read_entry(run, run.path.name if run.path == root else str(run.path.relative_to(root)))
        for run in found.runs
    ]
    newest_first = sorted(listed, key=lambda entry: entry.last_start_s, reverse=True)
    return RunList(entries=tuple(newest_first), whole=found.whole)


def read_entry(run: RunDirectory, label: str, *, with_steps: bool = False) -> RunEntry:
    """Read what one line says of a run.

    Args:
        run: The run directory; any of its files may be missing or partial.
        label: How the list names it.
        with_steps: Whether to read the rows within the epochs, which may be many.
    """
    report = read_run(run, with_steps=with_steps)
    best, best_by = _best_figure(report)
    return RunEntry(label=label, report=report, state=_state(report), best=best, best_by=best_by)


def shared_unit(runs: Sequence[RunEntry]) -> SampleUnit:
    """Return what the samples of all these runs are called."""
    return "images" if all(entry.report.unit == "images" for entry in runs) else "samples"


def newest_unfinished(listed: Sequence[RunEntry]) -> RunEntry | None:
    """Choose the first run of a list that hasn't finished; no trial of a study."""
    own = (entry for entry in listed if not is_of_study(entry.report.path))
    return next((entry for entry in own if entry.state not in ("finished", "damaged")), None)


def run_of_command(named: Sequence[str], command: str, doing: str, word: str) -> RunDirectory:
    """Find the run that a command names; without a name take the newest, and print which.

    A trial of a study is taken only where there is nothing else.

    Args:
        named: The command's words.
        command: Its name.
        doing: What it does with a run, such as "Evaluating".
        word: What names a run in the command's usage.

    Raises:
        UsageError: There is no such run, or none at all.
    """
    if named:
        return choose_run(*named)
    listed = list_runs(USUAL_FOLDER.absolute()).entries
    own = [entry for entry in listed if not is_of_study(entry.report.path)]
    newest = next(iter(own or listed), None)
    if newest is None:
        raise UsageError(
            f"there are no runs in {USUAL_FOLDER.absolute()}. Name a run directory: "
            f"paceline {command} {word}"
        )
    note(f"{doing} {USUAL_FOLDER / newest.label}")
    return RunDirectory(newest.report.path)


def table_lines(listed: Sequence[RunEntry], now: datetime) -> list[str]:
    """Lay out runs as a table, with what is wrong with damaged ones below it.

    Args:
        listed: At least one.
        now: Until when ages are counted.
    """
    speed = f"{shared_unit(listed)}/s"
    header = ["run", "recipe", "state", "best", "epochs", speed, "workers", "started"]
    rows = [[printable(cell) for cell in _cells(entry, now)] for entry in listed]
    lines = aligned([header, *rows], left=range(3))
    for entry in listed:
        if entry.report.run or entry.state != "running":  # one that has just begun has no files
            lines += [printable(f"{entry.label}: {text}") for text in entry.report.problems]
    return lines


def _cells(entry: RunEntry, now: datetime) -> tuple[str, ...]:
    done, planned = entry.report.epochs_done, entry.planned_epochs
    is_counted = planned is not None and planned < _UNLIMITED_EPOCHS
    write: Callable[[float | None], str] = figures.show_percent
    if entry.best_by == "val_loss":
        write = figures.dashed(figures.show_loss)
    return (
        entry.label,
        entry.recipe or figures.NOTHING,
        entry.state,
        write(entry.best),
        f"{done:,}/{planned:,}" if is_counted else f"{done:,}",
        figures.show_speed(entry.report.figure("images_per_s")),
        figures.show_count(entry.workers),
        _age(entry.started_at, now),
    )


def _age(moment: datetime | None, now: datetime) -> str:
    """Format how long ago something was, in its largest unit: `5 min ago`."""
    if moment is None:
        return figures.NOTHING
    age_s = max(0, int((now - moment).total_seconds()))
    size, unit = next(((size, name) for size, name in _UNITS if age_s >= size), (1, "s"))
    return f"{age_s // size:,} {unit} ago"


def _best_figure(report: RunReport) -> tuple[float | None, str]:
    """Return the best epoch's figure and its column: what `--best-by` says, else the loss."""
    by = text(section(report.run, "settings"), "best_by") or "val_accuracy"
    position = best_position(report)
    if not report.metrics.has(by):
        by = "val_loss"
    value = math.nan if position is None else report.metrics.column(by)[position]
    return (None, by) if math.isnan(value) else (value, by)


def _state(report: RunReport) -> ListedState:
    state = find_state(report)
    if report.run or state == "running":
        return state
    return "failed" if report.failures else "damaged"  # a script may fail before its session


def _moment(written: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(written)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)
