"""Reads what a tracker is given: the run, and new rows of `steps.csv` and `metrics.csv`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import final

from paceline.metrics.tags import EPOCH_TAGS, POSITION, STEP_TAGS, tag_of
from paceline.report.load_run import read_run
from paceline.report.run_outcome import find_state
from paceline.results.growing_table import GrowingTable
from paceline.results.json_object import JsonObject, section, text, texts
from paceline.results.metrics_table import Cells, parse_rows
from paceline.results.run_directory import RunDirectory
from paceline.tracking.base import Ending, Row, RunInfo
from paceline.training.config import training_options

_MAX_BYTES = 8 << 20
"""Of a table that are read at once; the rest comes the next time."""
_BESIDE_TRAINING = frozenset({"tracker", "tracker_project", "name", "tag", "note"})
"""Options that say nothing of what is trained."""


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """How far a tracker has the rows of both tables."""

    step: int = -1
    """Newest step of `steps.csv`."""
    epoch: int = 0
    """Newest epoch of `metrics.csv`."""

    def after(self, row: Row) -> "Cursor":
        """Give the cursor once the tracker has a row."""
        if row.epoch is None:
            return Cursor(step=max(self.step, row.step), epoch=self.epoch)
        return Cursor(step=self.step, epoch=max(self.epoch, row.epoch))


@final
class NewRows:
    """Reads what is new in both tables, in order of steps."""

    def __init__(self, run: RunDirectory, cursor: Cursor, last_step: int | None = None) -> None:
        """Create the new rows.

        Args:
            run: The run directory.
            cursor: What the tracker has; these rows are left out, also where a resumed training
                goes through the same steps once more.
            last_step: The newest step that it says it has itself; what is newer isn't left out.
        """
        self._steps = GrowingTable(run.steps_csv, _MAX_BYTES)
        self._epochs = GrowingTable(run.metrics_csv, _MAX_BYTES)
        self._cursor = cursor
        self._newest = math.inf if last_step is None else last_step

    def read(self) -> list[Row]:
        """Give the rows that have come since the last call."""
        # The steps first: a row of an epoch is written before the next epoch's steps, so that none
        # comes later than rows of steps that lie behind it.
        steps, epochs = _new_rows(self._steps), _new_rows(self._epochs)
        rows = [_row(cells, STEP_TAGS) for cells in steps]
        rows += [_row(cells, EPOCH_TAGS, is_epoch=True) for cells in epochs]
        new = [row for row in rows if row is not None and self._is_new(row)]
        return sorted(new, key=lambda row: (row.step, row.epoch is not None))

    def _is_new(self, row: Row) -> bool:
        known = row.step <= self._cursor.step
        if row.epoch is not None:
            known = row.epoch <= self._cursor.epoch
        return not known or row.step > self._newest


def _row(cells: Cells, tags: Mapping[str, str], *, is_epoch: bool = False) -> Row | None:
    """Make a row of cells; None where it has no step (or epoch)."""
    found = {name: _figure(cell) for name, cell in cells.items()}
    figures = {n: v for n, v in found.items() if v is not None}
    if "step" not in figures or "epoch" not in figures:
        return None
    return Row(
        step=int(figures["step"]),
        time_s=figures.get("time_s", 0.0),
        figures={
            f"progress/{name}" if name in POSITION else tags.get(name) or tag_of(name): value
            for name, value in figures.items()
            if name != "step"
        },
        epoch=int(figures["epoch"]) if is_epoch else None,
    )


def _figure(cell: str) -> float | None:
    try:
        value = float(cell)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _new_rows(table: GrowingTable) -> list[Cells]:
    """Give the complete rows that are new; none where it isn't there yet, or is something else."""
    try:
        return parse_rows(table.read()[0])
    except (OSError, ValueError):
        return []


def describe(run: RunDirectory, project: str | None) -> RunInfo:
    """Say what a run is.

    Args:
        run: The run directory, with its `run.json`.
        project: Under which the user wants it; None for the recipe's name.

    Raises:
        UsageError: `run.json` can't be read.
    """
    content = run.read_run()
    settings = section(content, "settings")
    recipe = text(content, "recipe").rpartition("/")[2].replace(".py", "")
    return RunInfo(
        path=run.path,
        name=text(settings, "name") or run.path.name,
        project=project or recipe.replace(":", "-") or "paceline",
        is_project_given=project is not None,
        config=_config(content),
        tags=texts(settings, "tag"),
        note=text(settings, "note"),
        started_s=_seconds(text(content, "started_at")),
    )


def _config(content: JsonObject) -> dict[str, object]:
    """List what tells a run from others: changed settings, the recipe's arguments, the commit."""
    known, settings = training_options(), section(content, "settings")
    found = {
        name: value
        for name, value in settings.items()
        if name in known and name not in _BESIDE_TRAINING and not _is(value, known[name].default)
    }
    derived = section(content, "derived")
    facts = {name: derived[name] for name in ("global_batch", "world_size") if name in derived}
    git = content.get("git")
    commit = {"git": git} if git else {}
    return (
        {"recipe": content.get("recipe")}
        | facts
        | found
        | commit
        | dict(section(content, "recipe_arguments"))
    )


def _is(value: object, default: object) -> bool:
    return value == (list(default) if isinstance(default, tuple) else default)


def _seconds(moment: str) -> float:
    try:
        return datetime.fromisoformat(moment).timestamp()
    except ValueError:
        return 0.0


def ending_of(run: RunDirectory) -> Ending:
    """Say how a training ended that runs no more."""
    report = read_run(run)
    # Whoever owns the run still does where this process runs beside the training: it waits for it.
    state = find_state(replace(report, locked=False))
    if state == "finished" or state == "failed":  # which mypy understands
        return state
    return "stopped"


def summary_of(run: RunDirectory) -> dict[str, float]:
    """List the numbers of `summary.json`; none where a training was killed."""
    try:
        content = run.read_summary()
    except (OSError, ValueError):
        return {}
    return {
        name: value
        for name, value in content.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
