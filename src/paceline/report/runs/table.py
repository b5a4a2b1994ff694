"""A list of runs as the cells of a table, and as lines that fit a terminal."""

from collections.abc import Sequence
from datetime import datetime

from paceline.options import figures
from paceline.options.text import aligned, fitted, printable
from paceline.report.runs.listing import RunEntry, RunList, arguments_of, shared_unit
from paceline.results.run_directory import fit_name
from paceline.training.config import typed_name

HEADER = ("run", "recipe", "state", "best", "epochs", "{}/s", "workers", "started")
_GAP = 2
_GIVE_WAY = ("recipe", "workers")
_UNCOUNTED = 100_000
"""So many epochs mean no limit: a measurement's, or one that something else ends."""
_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def table_lines(listed: RunList, now: datetime, width: int | None, setting: str = "") -> list[str]:
    """Lay out a list for a terminal, with what is wrong with damaged runs below it.

    Args:
        now: Until when ages are counted.
        width: Characters of a line; None where lines may be of any length.
        setting: Has a column of its own, for instance what the list is sorted by.
    """
    rows = [[*map(printable, cells_of(entry, now))] for entry in listed.entries]
    titles = [title.format(shared_unit(listed.entries)) for title in HEADER]
    if setting:
        place = titles.index("best")
        titles.insert(place, typed_name(setting))
        for row, entry in zip(rows, listed.entries, strict=True):
            value = arguments_of(entry.report.run).get(setting)
            row.insert(place, printable(figures.show_value(value)))
    rows, header = (rows, titles) if width is None else _fit(rows, titles, width)
    long = [] if width is None else _part_long_names(rows, header, width)
    left = range(header.index("state") + 1)
    lines = _with_tags(aligned([header, *rows], left=left), listed, width)
    # Each name that got no room stands above its row; from the end, since lines move.
    for place, name in reversed(list(enumerate(long, 1))):
        lines[place:place] = [name] if name else []
    for entry in listed.entries:
        for problem in problems_of(entry):
            line = f"{printable(entry.label)}: {printable(problem)}"
            lines += [line] if width is None else fitted(line, width).split("\n")
    return lines


def _with_tags(lines: list[str], listed: RunList, width: int | None) -> list[str]:
    """Add the runs' tags where there are any, and room for them."""
    tags = [printable(", ".join(entry.report.notes.tags)) for entry in listed.entries]
    start = max(map(len, lines)) + _GAP
    if not any(tags) or (width is not None and start + max(map(len, [*tags, "tags"])) > width):
        return lines
    joined = zip(lines, ["tags", *tags], strict=True)
    return [f"{line:{start}}{shown}".rstrip() for line, shown in joined]


def cells_of(entry: RunEntry, now: datetime) -> tuple[str, ...]:
    """Write one run, a cell for each column of `HEADER`."""
    return (
        _named(entry),
        entry.recipe or figures.NOTHING,
        entry.state,
        show_best(entry.best, entry.best_by),
        show_epochs(entry),
        figures.show_speed(entry.images_per_s),
        figures.show_count(entry.workers),
        show_age(entry.started_at, now),
    )


def _named(entry: RunEntry) -> str:
    """Give the run's place, after its name where that says something else."""
    named = entry.name not in entry.label and fit_name(entry.name) not in entry.label
    return f"{entry.name} ({entry.label})" if named else entry.label


def problems_of(entry: RunEntry) -> Sequence[str]:
    """Say what can't be read of a run; nothing of one that has just begun."""
    just_begun = entry.state == "running" and not entry.report.run
    return () if just_begun else entry.report.problems


def show_best(value: float | None, column: str) -> str:
    """Write the best figure: an accuracy in percent, a loss without a unit."""
    write = figures.dashed(figures.show_loss) if column == "val_loss" else figures.show_percent
    return write(value)


def show_epochs(entry: RunEntry) -> str:
    """Write `3/10`, or `3` where nobody knows of how many, or nobody counts them."""
    planned = entry.planned_epochs
    counted = planned is not None and planned < _UNCOUNTED
    return f"{entry.epochs:,}/{planned:,}" if counted else f"{entry.epochs:,}"


def show_age(moment: datetime | None, now: datetime) -> str:
    """Write how long ago something was, in its largest unit: `5 min ago`."""
    if moment is None:
        return figures.NOTHING
    age_s = max(0, int((now - moment).total_seconds()))
    unit = next(((size, name) for size, name in _UNITS if age_s >= size), (1, "s"))
    return f"{age_s // unit[0]:,} {unit[1]} ago"


def _fit(rows: list[list[str]], header: list[str], width: int) -> tuple[list[list[str]], list[str]]:
    """Leave out columns, the recipe first, until the others fit a width, or none can go."""
    for title in _GIVE_WAY:
        place = header.index(title)
        if _width([header, *rows]) > width:
            rows = [[*row[:place], *row[place + 1 :]] for row in rows]
            header = [*header[:place], *header[place + 1 :]]
    return rows, header


def _part_long_names(rows: list[list[str]], header: list[str], width: int) -> list[str]:
    """Take the names out of the rows that have no room for them. Returns them, "" for the others.

    A name is never cut, so that it can be copied: it gets a line of its own.
    """
    room = width - _width([["", *row[1:]] for row in [header, *rows]])
    long = [row[0] if len(row[0]) > room else "" for row in rows]
    for row, name in zip(rows, long, strict=True):
        row[0] = "" if name else row[0]
    return long


def _width(rows: Sequence[Sequence[str]]) -> int:
    columns = list(zip(*rows, strict=True))
    return sum(max(map(len, column)) for column in columns) + _GAP * (len(columns) - 1)
