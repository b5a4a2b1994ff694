"""Pages about several runs, each one file: the index of a folder, and a comparison."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

from markupsafe import Markup

from paceline._version import __version__
from paceline.options import figures
from paceline.options.figures import plural
from paceline.report.runs.comparison import Comparison
from paceline.report.runs.curves import WAYS, curve_pictures
from paceline.report.runs.listing import RunEntry, RunList, places_of, shared_unit
from paceline.report.runs.table import problems_of, show_best, show_epochs
from paceline.report.scaling.lines import draw_lines
from paceline.report.sections import moment
from paceline.report.templating import fill_template, read_script, write_page

_GENERATOR = "Paceline runs"
_BY = "`paceline runs` or compare"
_COLOURS = {"stopped": "interrupted", "died": "interrupted", "damaged": "failed"}


@dataclass(frozen=True)
class _Column:
    title: str
    text: bool = False
    """Words rather than figures: to the left, and from a to z at first."""

    @property
    def first(self) -> str:
        """Which way round it is sorted at first: names from a, figures from the largest."""
        return "ascending" if self.text else "descending"


@dataclass(frozen=True, kw_only=True)
class _Cell:
    text: str
    key: str
    """What it is sorted by; empty where nothing is known."""
    state: str = ""
    """The colour of the dot before it."""


@dataclass(frozen=True, kw_only=True)
class _PageRow:
    cells: tuple[_Cell, ...]
    link: str
    place: str
    """Its directory, where another run has the same name."""
    tags: Sequence[str]
    note: str

    @property
    def remark_key(self) -> str:
        """What the column of tags and notes is sorted by."""
        return " ".join([*self.tags, self.note]).strip()


_COLUMNS = (
    _Column("run", text=True),
    _Column("recipe", text=True),
    _Column("state", text=True),
    _Column("best accuracy"),
    _Column("lowest loss"),
    _Column("epochs"),
    _Column("{}/s"),
    _Column("workers"),
    _Column("started, UTC"),
)
_REMARKS = _Column("tags, note", text=True)


def write_index(listed: RunList, now: datetime) -> Path:
    """Write `index.html` into a folder of runs: their list, with links to their reports.

    The page needs no network; a script of its own sorts it.

    Raises:
        UsageError: There is an `index.html` that isn't such a page, or it can't be written.
        StorageError: The disk is full.
    """
    places = places_of(listed.entries)
    pairs = zip(listed.entries, places, strict=True)
    columns, rows = _without_empty([_row(entry, listed.root, place) for entry, place in pairs])
    unit = shared_unit(listed.entries)
    columns = [replace(column, title=column.title.format(unit)) for column in columns]
    remarks = any(row.remark_key for row in rows)
    page = fill_template(
        "runs.html",
        title=listed.root.name or str(listed.root),
        generator=_GENERATOR,
        counted=plural(len(listed.entries), "run"),
        written_at=moment(now.isoformat(timespec="seconds")),
        columns=[*columns, *([_REMARKS] if remarks else [])],
        rows=rows,
        remarks=remarks,
        problems=[f"{e.label}: {problem}" for e in listed.entries for problem in problems_of(e)],
        script=read_script("sort.js"),
        directory=str(listed.root),
        paceline=__version__,
    )
    return write_page(listed.root / "index.html", page, _GENERATOR, _BY)


def write_comparison(shown: Comparison, path: Path) -> Path:
    """Write a comparison as a page that needs no network.

    A script of its own shows values and zooms.

    Raises:
        UsageError: There is a file that isn't such a page, or it can't be written.
        StorageError: The disk is full.
    """
    ways = []
    for across, name in WAYS.items():
        pictures = curve_pictures(shown, across)
        if pictures:
            drawn = [(picture, Markup(draw_lines(picture))) for picture in pictures]
            ways.append((f"By {name}", drawn))
    pairs = list(zip(shown.letters, shown.runs, strict=True))
    places = places_of(shown.runs)
    page = fill_template(
        "compare.html",
        title=f"{plural(len(shown.runs), 'run')} side by side",
        generator=_GENERATOR,
        letters=shown.letters,
        runs=[
            {**_compared(letter, entry, path.parent), "place": place}
            for (letter, entry), place in zip(pairs, places, strict=True)
        ],
        problems=[
            *([shown.left_out] if shown.left_out else []),
            *(f"{letter}: {problem}" for letter, e in pairs for problem in problems_of(e)),
        ],
        settings=shown.settings,
        figures=shown.figures,
        ways=ways,
        script=read_script("chart.js"),
        directory=str(path),
        paceline=__version__,
    )
    return write_page(path, page, _GENERATOR, _BY)


def _compared(letter: str, entry: RunEntry, folder: Path) -> dict[str, object]:
    return {
        "letter": letter,
        "name": entry.name,
        "state": entry.state,
        "colour": _COLOURS.get(entry.state, entry.state),
        "tags": entry.report.notes.tags,
        "note": entry.report.notes.note,
        "link": _link(entry, folder),
    }


def _row(entry: RunEntry, root: Path, place: str) -> _PageRow:
    by_loss = entry.best_by == "val_loss"
    accuracy, loss = (None, entry.best) if by_loss else (entry.best, None)
    state = _COLOURS.get(entry.state, entry.state)
    started = entry.started_at
    notes = entry.report.notes
    return _PageRow(
        cells=(
            _Cell(text=entry.name, key=entry.name),
            _Cell(text=entry.recipe or figures.NOTHING, key=entry.recipe),
            _Cell(text=entry.state, key=entry.state, state=state),
            _figure(show_best(accuracy, "val_accuracy"), accuracy),
            _figure(show_best(loss, "val_loss"), loss),
            _figure(show_epochs(entry), entry.epochs),
            _figure(figures.show_speed(entry.images_per_s), entry.images_per_s),
            _figure(figures.show_count(entry.workers), entry.workers),
            _figure(
                f"{started.astimezone(UTC):%Y-%m-%d %H:%M}" if started else figures.NOTHING,
                started.timestamp() if started else None,
            ),
        ),
        link=_link(entry, root),
        place=place,
        tags=notes.tags,
        note=notes.note,
    )


def _without_empty(rows: Sequence[_PageRow]) -> tuple[list[_Column], list[_PageRow]]:
    """Leave out columns in which nothing is known of any run."""
    kept = [i for i in range(len(_COLUMNS)) if not rows or any(row.cells[i].key for row in rows)]
    shown = [replace(row, cells=tuple(row.cells[i] for i in kept)) for row in rows]
    return [_COLUMNS[i] for i in kept], shown


def _figure(text: str, value: float | None) -> _Cell:
    return _Cell(text=text, key="" if value is None else repr(float(value)))


def _link(entry: RunEntry, folder: Path) -> str:
    """Give where the run's report is, seen from a folder; empty where there is none."""
    page = entry.report.path / "report.html"
    return quote(os.fsencode(os.path.relpath(page, folder))) if page.is_file() else ""
