"""A comparison of runs as lines for a terminal."""

from collections.abc import Iterator, Sequence

from paceline.options.text import aligned, cut, printable
from paceline.report.runs.comparison import Comparison, Row
from paceline.report.runs.curves import CurveTable

_MAX_CELL_LENGTH = 24
_GAP = 2


def comparison_lines(
    shown: Comparison, tables: Sequence[CurveTable], width: int | None
) -> Iterator[str]:
    """Lay out a comparison: which runs, settings that differ, final figures, curves.

    Args:
        tables: Of their curves.
        width: Characters of a line; None where lines may be of any length.
    """
    # Which runs: the letters head the columns below.
    for letter, entry in zip(shown.letters, shown.runs, strict=True):
        name = entry.report.notes.name
        named = f"  {name}" if name and name not in entry.label else ""
        tags = f"  [{', '.join(entry.report.notes.tags)}]" if entry.report.notes.tags else ""
        yield printable(f"{letter}  {entry.report.path}{named}{tags}")
    if shown.left_out:
        yield shown.left_out
    yield ""
    # Settings that differ, then final figures.
    if shown.settings:
        yield from _table("setting", shown.settings, shown.letters, width)
    else:
        yield "No setting differs."
    yield ""
    yield from _table("result", shown.figures, shown.letters, width)
    # Curves.
    for table in tables:
        yield ""
        yield table.title
        yield from _table(table.across, table.rows, shown.letters, width)


def _table(
    title: str, rows: Sequence[Row], letters: Sequence[str], width: int | None
) -> Iterator[str]:
    """Lay out a column for each run; below each other where they don't fit beside each other."""
    names = [title, *(cut(printable(row.label), _MAX_CELL_LENGTH) for row in rows)]
    columns = [
        [letter, *(cut(printable(row.cells[place]), _MAX_CELL_LENGTH) for row in rows)]
        for place, letter in enumerate(letters)
    ]
    first = max(map(len, names))
    block: list[list[str]] = []
    used = first
    # As many columns as fit into the width make a block; the next block stands below.
    for column in columns:
        more = max(map(len, column)) + _GAP
        if block and width is not None and used + more > width:
            yield from aligned(list(zip(names, *block, strict=True)), left=(0,))
            yield ""
            block, used = [], first
        block.append(column)
        used += more
    yield from aligned(list(zip(names, *block, strict=True)), left=(0,))
