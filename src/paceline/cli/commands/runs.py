"""`paceline runs [DIR]`: lists the runs below a folder; reads them only."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from paceline.errors import ExitCode, UsageError
from paceline.options.command_line import note, read_command
from paceline.options.fields import option_fields, pick
from paceline.options.text import printable
from paceline.results.find_runs import MAX_FOLDERS, MAX_LEVELS
from paceline.results.run_directory import USUAL_FOLDER, RunDirectory

if TYPE_CHECKING:
    from paceline.report.runs.listing import RunList

_USAGE = "paceline runs [DIR]"
_ABOUT = (
    "List the runs below a folder, by default runs: how each stands, its best validation result "
    "(accuracy, or with --best-by val_loss the loss), epochs, speed, workers, and when it was "
    "started. No run is changed."
)


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """Which runs, in which order, and how."""

    sort: str = "started"
    """Column: name, recipe, state, best, epochs, images-per-s, workers or started; the best,
    largest and newest come first. Or any setting or recipe argument, the smallest first: the list
    shows it, too."""
    reverse: bool = False
    """The other way round."""
    filter: tuple[str, ...] = ()
    """Only runs with NAME=VALUE: name, recipe, state (running, finished, stopped, failed, died,
    damaged), tag, workers, or any setting or recipe argument, such as lr=0.1. * and ? stand for any
    letters. Repeat it: all have to hold."""
    html: bool = field(default=False, metadata={"group": "Output"})
    """Write DIR/index.html: the list as a page, with links to the runs' reports."""
    json: bool = field(default=False, metadata={"group": "Output"})
    """Write JSON: a list."""


_OPTIONS = option_fields(ListOptions, "List")


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    named, given = read_command(_USAGE, _ABOUT, tokens, _OPTIONS, "the folder")
    options = pick(ListOptions, given)
    root = RunDirectory.named(named[0] if named else USUAL_FOLDER).path
    if named and not root.is_dir():
        raise UsageError(f"{root} is no folder")
    from paceline.report.runs.listing import filter_runs, list_runs, sort_runs

    # Find all runs below the folder, then apply --filter, --sort and --reverse.
    listing = list_runs(root)
    kept = sort_runs(filter_runs(listing.entries, options.filter), options.sort)
    if options.reverse:
        kept.reverse()
    listed = replace(listing, entries=tuple(kept))
    if not listing.whole:
        note(
            f"{root} is larger than what is looked through ({MAX_FOLDERS:,} folders, "
            f"{MAX_LEVELS} levels): name a folder within it to see all runs there"
        )
    if not (listed.entries or options.json or (options.html and root.is_dir())):
        which = "No run matches" if listing.entries else "There are no runs"
        note(f"{which} in {root}")
    else:
        _show(listed, options)
    return ExitCode.DONE


def _show(listed: "RunList", options: ListOptions) -> None:
    """Write a page, or print JSON or a table."""
    if options.html:
        from paceline.report.runs.pages import write_index

        print(printable(str(write_index(listed, datetime.now(UTC)))))
    elif options.json:
        print(json.dumps([entry.to_json() for entry in listed.entries], indent=2))
    else:
        from paceline.report.runs.listing import setting_of
        from paceline.report.runs.table import table_lines

        setting = setting_of(options.sort)
        for line in table_lines(listed, datetime.now(UTC), terminal_width(), setting):
            print(line)


def terminal_width() -> int | None:
    """Give the characters of a line; None where what is printed goes to a file or a program."""
    return shutil.get_terminal_size((0, 0)).columns or None
