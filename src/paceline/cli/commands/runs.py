"""`paceline runs [DIR]`: lists the runs below a folder, the newest first; reads them only."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from paceline.errors import ExitCode, UsageError
from paceline.options.command_line import note, read_command
from paceline.options.fields import option_fields, pick
from paceline.results.find_runs import MAX_FOLDERS, MAX_LEVELS
from paceline.results.run_directory import USUAL_FOLDER, RunDirectory

_ABOUT = (
    "List the runs below DIR, by default runs/, those of studies among them: state, best result, "
    "speed, when. The newest come first. No run is changed."
)


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """How the list is written."""

    json: bool = field(default=False, metadata={"group": "Output"})
    """Write JSON: a list."""


_OPTIONS = option_fields(ListOptions, "List")


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    named, given = read_command("paceline runs [DIR]", _ABOUT, tokens, _OPTIONS, "the folder")
    root = RunDirectory.named(named[0] if named else USUAL_FOLDER).path
    if named and not root.is_dir():
        raise UsageError(f"{root} is no folder")
    from paceline.report.runs.listing import list_runs, table_lines

    listed = list_runs(root)
    if not listed.whole:
        note(
            f"{root} is larger than what is looked through ({MAX_FOLDERS:,} folders, "
            f"{MAX_LEVELS} levels): name a folder within it to see all runs there"
        )
    if pick(ListOptions, given).json:
        print(json.dumps([entry.to_json() for entry in listed.entries], indent=2))
    elif listed.entries:
        print("\n".join(table_lines(listed.entries, datetime.now(UTC))))
    else:
        note(f"There are no runs in {root}")
    return ExitCode.DONE
