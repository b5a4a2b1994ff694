"""`paceline compare A B ...`: shows what differs between runs; reads them only."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.commands.runs import terminal_width
from paceline.errors import ExitCode
from paceline.options.command_line import note, read_options, show_help, wants_help
from paceline.options.fields import option_fields, pick
from paceline.options.text import printable

if TYPE_CHECKING:
    from paceline.report.runs.comparison import Comparison
    from paceline.results.metrics_table import Metrics

_USAGE = "paceline compare RUN RUN ..."
_ABOUT = (
    "Show runs side by side: the settings that differ, how each ended, and a figure's course by "
    "step, by time and by samples. RUN is a run directory, the name of a run below runs/, or a "
    "folder: all runs in it. No run is changed."
)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """What is shown, and how."""

    metric: str | None = None
    """The figure whose course is shown: a column of metrics.csv or steps.csv, such as val_loss.
    Default: what --best-by of the first run says, where most runs have it."""
    html: str | None = field(default=None, metadata={"group": "Output"})
    """Write a page with all curves to this file instead."""
    json: bool = field(default=False, metadata={"group": "Output"})
    """Write JSON: all runs, with their curves."""


_OPTIONS = option_fields(CompareOptions, "Compare")


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    if wants_help(tokens):
        show_help(_USAGE, _ABOUT, _OPTIONS, tokens)
    places = list(takewhile(lambda token: not token.startswith("-"), tokens))
    given = read_options(_USAGE, _ABOUT, tokens[len(places) :], _OPTIONS).values
    options = pick(CompareOptions, given)
    from paceline.report.runs.comparison import choose_runs, compare
    from paceline.report.runs.curves import choose_metric, curve_tables
    from paceline.report.runs.text import comparison_lines

    # Runs with missing or damaged files are compared by what can be read of them.
    runs = choose_runs(places)
    for entry in runs:
        for problem in entry.report.problems:
            note(f"{entry.report.path}: {problem}")
    # JSON has all runs; a page and the terminal show the newest ones.
    if options.json:
        print(json.dumps(_as_json(compare(runs, most=None)), indent=2))
        return ExitCode.DONE
    shown = compare(runs)
    metric = choose_metric(shown.runs, options.metric)
    if options.html:
        from paceline.report.runs.pages import write_comparison

        page = write_comparison(shown, Path(options.html).expanduser().absolute())
        print(printable(str(page)))
        return ExitCode.DONE
    for line in comparison_lines(shown, curve_tables(shown, metric), terminal_width()):
        print(line)
    return ExitCode.DONE


def _as_json(shown: "Comparison") -> Mapping[str, object]:
    """Write all of a comparison, the tables by columns; null where a run has no such value."""
    runs = []
    for place, entry in enumerate(shown.runs):
        runs.append(
            {
                **entry.to_json(),
                "settings": {row.name: row.values[place] for row in shown.settings},
                "figures": {_key(row.name): row.values[place] for row in shown.figures},
                "curves": _columns(entry.report.metrics),
                "steps": _columns(entry.report.steps),
            }
        )
    return {"runs": runs}


def _key(name: str) -> str:
    """Name a figure for programs: the same whatever the samples are."""
    return "images/s" if name == "samples/s" else name


def _columns(table: "Metrics") -> Mapping[str, Sequence[float | None]]:
    return {
        name: [None if math.isnan(value) else value for value in values]
        for name, values in table.columns.items()
    }
