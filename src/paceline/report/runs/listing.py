"""The runs below a folder, each in one entry: what a table, a page and JSON say of it."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Literal

from paceline.errors import UsageError
from paceline.options.command_line import note
from paceline.options.fields import unknown_name
from paceline.options.figures import show_value
from paceline.report.charts import best_position
from paceline.report.load_run import RunReport, read_run
from paceline.report.run_outcome import RunState, find_state
from paceline.results.find_runs import choose_run, find_runs, is_of_study
from paceline.results.json_object import JsonObject, entries, section, text, whole
from paceline.results.run_directory import USUAL_FOLDER, RunDirectory, SampleUnit
from paceline.training.config import setting_named, typed_name

ListedState = RunState | Literal["damaged"]


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """One run of a list."""

    label: str
    """Its path below the folder that is listed."""
    report: RunReport
    state: ListedState
    best: float | None
    """The best validation figure, of which `best_by` says which."""
    best_by: str
    epochs: int
    """Complete ones."""
    planned_epochs: int | None
    images_per_s: float | None
    workers: int | None
    started_at: datetime | None

    @property
    def name(self) -> str:
        """What the user calls it, else its place."""
        return self.report.notes.name or self.label

    @property
    def recipe(self) -> str:
        """The recipe's name, or the script's."""
        return text(self.report.run, "recipe")

    def to_json(self) -> Mapping[str, object]:
        """Give the JSON object for other programs."""
        notes = self.report.notes
        return {
            "path": str(self.report.path),
            "name": notes.name or None,
            "tags": list(notes.tags),
            "note": notes.note or None,
            "recipe": self.recipe or None,
            "kind": text(self.report.run, "kind") or None,
            "state": self.state,
            "best": self.best,
            "best_by": self.best_by if self.best is not None else None,
            "epochs": self.epochs,
            "planned_epochs": self.planned_epochs,
            "images_per_s": self.images_per_s,
            "workers": self.workers,
            "started_at": self.started_at.isoformat() if self.started_at else None,
            "problems": list(self.report.problems),
        }


@dataclass(frozen=True, kw_only=True)
class RunList:
    """The runs below a folder."""

    root: Path
    entries: tuple[RunEntry, ...]
    whole: bool
    """Whether everything below the folder was looked at."""


def shared_unit(runs: Sequence[RunEntry]) -> SampleUnit:
    """Say what the samples of all these runs are called."""
    return "images" if all(entry.report.unit == "images" for entry in runs) else "samples"


def places_of(runs: Sequence[RunEntry]) -> list[str]:
    """Say where each run is that has its name in common with another; empty of the others."""
    names = Counter(entry.name for entry in runs)
    labels = Counter(entry.label for entry in runs)
    return [
        ""
        if names[entry.name] == 1
        else entry.label
        if labels[entry.label] == 1 and entry.label != entry.name
        else str(entry.report.path)
        for entry in runs
    ]


def list_runs(root: Path) -> RunList:
    """List the runs below a folder; one that is damaged is listed with what is wrong.

    Args:
        root: The folder, an absolute path.
    """
    found = find_runs(root)
    listed = tuple(read_entry(run, _below(run.path, root)) for run in found.runs)
    return RunList(root=root, entries=listed, whole=found.whole)


def read_entry(run: RunDirectory, label: str) -> RunEntry:
    """Read what one line says of a run.

    Args:
        run: The run directory; any of its files may be missing or partial.
    """
    report = read_run(run, with_steps=False)
    derived, settings = section(report.run, "derived"), section(report.run, "settings")
    best, best_by = best_figure(report)
    return RunEntry(
        label=label,
        report=report,
        state=_state(report),
        best=best,
        best_by=best_by,
        epochs=report.epochs_done,
        planned_epochs=whole(settings, "epochs") if _has_epochs(report.run) else None,
        images_per_s=report.figure("images_per_s"),
        workers=whole(derived, "world_size"),
        started_at=_moment(text(report.run, "started_at")),
    )


def best_figure(report: RunReport) -> tuple[float | None, str]:
    """Give the figure of the best epoch, and its column: what `--best-by` says, as far as there is.

    Where a training has no accuracy, its loss counts.
    """
    by = text(section(report.run, "settings"), "best_by") or "val_accuracy"
    position = best_position(report)
    if not report.metrics.has(by):
        by = "val_loss"
    value = math.nan if position is None else report.metrics.column(by)[position]
    return (None, by) if math.isnan(value) else (value, by)


def newest_unfinished(listed: Sequence[RunEntry]) -> RunEntry | None:
    """Choose the run that was started last, or gone on with, of those that haven't finished.

    Not a trial of a study, which goes on by itself.
    """
    own = [entry for entry in listed if not is_of_study(entry.report.path)]
    open_ones = [entry for entry in own if entry.state not in ("finished", "damaged")]
    return max(open_ones, key=_last_start, default=None)


def newest_started(listed: Sequence[RunEntry]) -> RunEntry | None:
    """Choose the run that was started or resumed last.

    A trial of a study only where there is nothing else.
    """
    own = [entry for entry in listed if not is_of_study(entry.report.path)]
    return max(own or listed, key=_last_start, default=None)


def newest_running(listed: Sequence[RunEntry]) -> RunEntry | None:
    """Choose as `newest_started` of the runs that run; else of all."""
    own = [entry for entry in listed if not is_of_study(entry.report.path)] or listed
    running = [entry for entry in own if entry.state == "running"]
    return newest_started(running or own)


def run_of_command(
    named: Sequence[str],
    command: str,
    doing: str,
    choose: Callable[[Sequence[RunEntry]], RunEntry | None],
    word: str = "RUN_DIR",
) -> RunDirectory:
    """Find the run that a command names; where it names none choose one, and say which.

    Args:
        doing: What it does with a run, such as "Watching".
        choose: Chooses among the runs below runs/.
        word: What names a run in the command's usage.

    Raises:
        UsageError: There is no such run, or none at all.
    """
    if named:
        return choose_run(*named)
    newest = choose(list_runs(USUAL_FOLDER.absolute()).entries)
    if newest is None:
        raise UsageError(
            f"there are no runs in {USUAL_FOLDER.absolute()}. Name a run directory: "
            f"paceline {command} {word}"
        )
    note(f"{doing} {USUAL_FOLDER / newest.label}")
    return RunDirectory(newest.report.path)


def sort_runs(listed: Sequence[RunEntry], column: str) -> list[RunEntry]:
    """Sort by a column: names from a to z, figures and times the best, largest or newest first.

    By a setting or recipe argument: the smallest first, or from a to z.

    Raises:
        UsageError: There is no such column, and no run has such a setting.
    """
    column, setting = _column_named(column), setting_of(column)
    is_setting = any(setting in arguments_of(entry.report.run) for entry in listed)
    if setting and listed and not is_setting:
        text = unknown_name(column.replace("_", "-"), SORT_COLUMNS, "column")
        raise UsageError(f"{text}, and every setting and recipe argument")
    key = _KEYS.get(column) or partial(_smallest_first, name=setting)
    keys = [(key(entry), place) for place, entry in enumerate(listed)]
    known = sorted((key, place) for key, place in keys if key is not None)
    unknown = [place for key, place in keys if key is None]
    return [listed[place] for place in (*(place for _, place in known), *unknown)]


def setting_of(column: str) -> str:
    """Name the setting that stands for a column to sort by; empty where it is a column."""
    column = _column_named(column)
    return "" if column in _KEYS else setting_named(column)


def _column_named(given: str) -> str:
    """Give a column's name, which may be given as its heading is written."""
    column = given.replace("-", "_").replace("/", "_per_")
    return _HEADINGS.get(column, column)


def filter_runs(listed: Sequence[RunEntry], conditions: Sequence[str]) -> list[RunEntry]:
    """Keep the runs that meet all conditions.

    Args:
        conditions: NAME=VALUE each, where NAME is name, recipe, state, tag, workers, or a setting
            or recipe argument of at least one run, and VALUE may have the wildcards * and ?.

    Raises:
        UsageError: A condition isn't of that form, or names what no run has.
    """
    kept = list(listed)
    for condition in conditions:
        name, equals, value = condition.partition("=")
        name = setting_named(name.strip().replace("-", "_"))
        if not equals or not name:
            raise UsageError(
                f"--filter {condition!r} should be NAME=VALUE, such as state=finished or lr=0.1"
            )
        # Refuse what no run has: a misspelt condition would filter out all of them.
        known = {*_FILTERS, *(n for entry in listed for n in arguments_of(entry.report.run))}
        name = name if name in known else _column_named(name)
        if listed and name not in known:
            names = [typed_name(each) for each in known]
            given = name.replace("_", "-")
            close = unknown_name(given, names, "name").partition(" Known:")[0]
            raise UsageError(
                f"--filter {condition}: {close} Known: {', '.join(_FILTERS)}, and every setting "
                "and recipe argument"
            )
        if name == "state" and not any(fnmatchcase(state, value) for state in _STATES):
            raise UsageError(f"--filter {condition}: a run is one of {', '.join(_STATES)}")
        kept = [entry for entry in kept if _meets(entry, name, value.strip())]
    return kept


def arguments_of(run: JsonObject) -> Mapping[str, object]:
    """Give settings and recipe arguments together, as they were resolved."""
    derived, settings = section(run, "derived"), section(run, "settings")
    # A setting that was left open has its value among what followed.
    resolved = {n: derived[n] for n, v in settings.items() if v is None and n in derived}
    return {**section(run, "recipe_arguments"), **settings, **resolved}


def _state(report: RunReport) -> ListedState:
    state = find_state(report)
    if report.run or state == "running":
        return state
    return "failed" if report.failures else "damaged"  # a script may fail before its session


def _below(path: Path, root: Path) -> str:
    return path.name if path == root else str(path.relative_to(root))


def _has_epochs(run: JsonObject) -> bool:
    """Tell whether `--epochs` plans them: a script's loop has its own number."""
    return text(run, "kind") != "script" or "epochs" in _given(run)


def _given(run: JsonObject) -> Sequence[object]:
    given = run.get("given")
    return given if isinstance(given, list) else ()


def _moment(written: str) -> datetime | None:
    try:
        found = datetime.fromisoformat(written)
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _last_start(entry: RunEntry) -> tuple[float, str]:
    starts = [text(start, "started_at") for start in entries(entry.report.run, "history")]
    moments = [_moment(written) for written in starts] + [entry.started_at]
    known = [moment.timestamp() for moment in moments if moment is not None]
    return max(known, default=0.0), entry.label


def _meets(entry: RunEntry, name: str, value: str) -> bool:
    if name in _FILTERS:
        return any(fnmatchcase(found, value) for found in _FILTERS[name](entry))
    arguments = arguments_of(entry.report.run)
    if name not in arguments:
        return False
    found = arguments[name]
    shown = {show_value(found), str(found)}
    return any(fnmatchcase(each, value) for each in shown) or _same_number(found, value)


def _same_number(found: object, value: str) -> bool:
    if isinstance(found, bool) or not isinstance(found, int | float):
        return False
    try:
        return float(value) == found
    except ValueError:
        return False


_STATES = ("running", "finished", "stopped", "failed", "died", "damaged")
_FILTERS: Mapping[str, Callable[[RunEntry], Sequence[str]]] = {
    "name": lambda entry: (entry.report.notes.name, entry.label),
    "recipe": lambda entry: (entry.recipe,),
    "state": lambda entry: (entry.state,),
    "tag": lambda entry: entry.report.notes.tags,
    "workers": lambda entry: (str(entry.workers),),
}


_Key = tuple[str, float]


def _best_first(entry: RunEntry) -> _Key | None:
    if entry.best is None:
        return None
    return entry.best_by, entry.best if entry.best_by == "val_loss" else -entry.best


def _largest_first(value: float | None) -> _Key | None:
    return None if value is None else ("", -value)


def _newest_first(entry: RunEntry) -> _Key | None:
    return None if entry.started_at is None else ("", -entry.started_at.timestamp())


def _smallest_first(entry: RunEntry, name: str) -> _Key | None:
    value = arguments_of(entry.report.run).get(name)
    if isinstance(value, int | float):
        return "", float(value)
    return None if value is None else (str(value), 0.0)


_HEADINGS = {"run": "name", "status": "state", "samples_per_s": "images_per_s"}
"""Other headings of the columns in tables, and what people call them."""
_KEYS: Mapping[str, Callable[[RunEntry], _Key | None]] = {
    "name": lambda entry: (entry.name, 0.0),
    "recipe": lambda entry: (entry.recipe, 0.0) if entry.recipe else None,
    "state": lambda entry: ("", _STATES.index(entry.state)),
    "best": _best_first,
    "epochs": lambda entry: _largest_first(entry.epochs),
    "images_per_s": lambda entry: _largest_first(entry.images_per_s),
    "workers": lambda entry: _largest_first(entry.workers),
    "started": _newest_first,
}
SORT_COLUMNS = tuple(name.replace("_", "-") for name in _KEYS)
"""What `--sort` takes beside settings and recipe arguments."""
