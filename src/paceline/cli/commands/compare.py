"""`paceline compare A B ...`: shows what differs between runs; reads them only."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from paceline.errors import ExitCode
from paceline.options.command_line import note, read_options, show_help, wants_help
from paceline.options.fields import option_fields, pick
from paceline.options.text import printable

_USAGE = "paceline compare RUN RUN ..."
_ABOUT = (
    "Show runs side by side: the settings that differ, and how each ended. RUN is a run directory, "
    "the name of a run below runs/, or a folder: all runs in it. No run is changed."
)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """How it is shown."""

    html: str | None = field(default=None, metadata={"group": "Output"})
    """Write a page to this file instead, with the curves over each other."""


_OPTIONS = option_fields(CompareOptions, "Compare")


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    if wants_help(tokens):
        show_help(_USAGE, _ABOUT, _OPTIONS, tokens)
    places = list(takewhile(lambda token: not token.startswith("-"), tokens))
    given = read_options(_USAGE, _ABOUT, tokens[len(places) :], _OPTIONS).values
    options = pick(CompareOptions, given)
    from paceline.report.runs.comparison import (
        choose_runs,
        compare,
        comparison_lines,
        write_comparison,
    )

    # Runs with missing or damaged files are compared by what can be read of them.
    shown = compare(choose_runs(places))
    for entry in shown.runs:
        for problem in entry.report.problems:
            note(f"{entry.report.path}: {problem}")
    if options.html:
        page = write_comparison(shown, Path(options.html).expanduser().absolute())
        print(printable(str(page)))
    else:
        print("\n".join(comparison_lines(shown)))
    return ExitCode.DONE
