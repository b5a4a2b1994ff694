"""`paceline label RUN_DIR`: names a run, tags it, and notes what is to be remembered of it."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import ExitCode, UsageError
from paceline.files import storing
from paceline.options.command_line import (
    ON_COMMAND_LINE,
    read_options,
    show_help,
    take_word,
    wants_help,
)
from paceline.options.fields import OptionField
from paceline.options.text import printable
from paceline.results.find_runs import RUN_OR_NAME, choose_run
from paceline.results.run_notes import RunNotes

_USAGE = "paceline label RUN_DIR"
_ABOUT = (
    "Change a run's name, tags and note, also while it runs; without options, show them. "
    "`paceline train --name ... --tag ... --note ...` gives them from the start. "
    f"{RUN_OR_NAME}"
)
_OPTIONS = (
    OptionField(
        name="name",
        annotation=None | str,
        default=None,
        help="The run's name; `none` takes it away. The directory keeps its own.",
        group="Label",
    ),
    OptionField(
        name="tag",
        annotation=tuple[str, ...],
        default=(),
        help="A tag to add. Repeat it for each.",
        group="Label",
    ),
    OptionField(
        name="untag",
        annotation=tuple[str, ...],
        default=(),
        help="A tag to take away. Repeat it for each.",
        group="Label",
    ),
    OptionField(
        name="note",
        annotation=None | str,
        default=None,
        help="The run's note; `none` takes it away.",
        group="Label",
    ),
)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    if wants_help(tokens):
        show_help(_USAGE, _ABOUT, _OPTIONS, tokens)
    where, rest = take_word(tokens, _USAGE, "the run directory")
    found = read_options(_USAGE, _ABOUT, rest, _OPTIONS)
    # PACELINE_NAME and the like in the environment are for trainings that begin.
    given = {n: v for n, v in found.values.items() if found.sources[n] == ON_COMMAND_LINE}
    run = choose_run(where)
    problems: list[str] = []
    before = RunNotes.read(run, run.read_run(), problems)
    if problems and not given:
        raise UsageError(f"{run.path}: {problems[0]}")
    # What was given over what there is.
    texts = {name: str(given[name] or "") for name in ("name", "note") if name in given}
    added, removed = _words(given.get("tag")), _words(given.get("untag"))
    for tag in removed:
        if tag not in before.tags:
            known = ", ".join(before.tags) or "none"
            raise UsageError(f"--untag {tag}: the run has no such tag. It has: {known}")
    kept = [tag for tag in before.tags if tag not in removed]
    notes = replace(before, **texts, tags=tuple(dict.fromkeys([*kept, *added])))
    notes.check()
    if given:
        with storing(run.path):
            notes.write(run)
    for label, value in (
        ("name", notes.name),
        ("tags", ", ".join(notes.tags)),
        ("note", notes.note),
    ):
        print(printable(f"{label}  {value or 'none'}"))
    return ExitCode.DONE


def _words(value: object) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, tuple) else ()
