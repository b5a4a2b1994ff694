"""`paceline label RUN_DIR`: names a run, tags it, and notes what is to be remembered of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline.errors import ExitCode, UsageError
from paceline.files import writing
from paceline.options.command_line import (
    read_options,
    show_help,
    take_word,
    wants_help,
)
from paceline.options.fields import option_fields, pick
from paceline.options.text import printable
from paceline.results.find_runs import RUN_OR_NAME, choose_run
from paceline.results.run_notes import RunNotes

_USAGE = "paceline label RUN_DIR"
_ABOUT = (
    "Change a run's name, tags and note, also while it runs; without options, show them. "
    "`paceline train --name ... --tag ... --note ...` gives them from the start. "
    f"{RUN_OR_NAME}"
)


@dataclass(frozen=True, kw_only=True)
class LabelOptions:
    """What is changed; what isn't given stays."""

    name: None | str = None  # noqa: RUF036  # the first type that fits is taken
    """The run's name; `none` takes it away. The directory keeps its own."""
    tag: tuple[str, ...] = ()
    """A tag to add. Repeat it for each."""
    untag: tuple[str, ...] = ()
    """A tag to take away. Repeat it for each."""
    note: None | str = None  # noqa: RUF036
    """The run's note; `none` takes it away."""


_OPTIONS = option_fields(LabelOptions, "Label")


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    if wants_help(tokens):
        show_help(_USAGE, _ABOUT, _OPTIONS, tokens)
    where, rest = take_word(tokens, _USAGE, "the run directory")
    parsed = read_options(_USAGE, _ABOUT, rest, _OPTIONS)
    # PACELINE_NAME and the like in the environment are for trainings that begin.
    given = {name: parsed.values[name] for name in parsed.typed()}
    run = choose_run(where)
    problems: list[str] = []
    before = RunNotes.read(run, run.read_run(), problems)
    if problems and not given:
        raise UsageError(f"{run.path}: {problems[0]}")
    # What was given over what there is.
    texts = {name: str(given[name] or "") for name in ("name", "note") if name in given}
    changes = pick(LabelOptions, given)
    for tag in changes.untag:
        if tag not in before.tags:
            known = ", ".join(before.tags) or "none"
            raise UsageError(f"--untag {tag}: the run has no such tag. It has: {known}")
    kept = [tag for tag in before.tags if tag not in changes.untag]
    notes = replace(before, **texts, tags=tuple(dict.fromkeys([*kept, *changes.tag])))
    notes.check()
    if given:
        with writing(run.notes_json):
            notes.write(run)
    for label, value in (
        ("name", notes.name),
        ("tags", ", ".join(notes.tags)),
        ("note", notes.note),
    ):
        print(printable(f"{label}  {value or 'none'}"))
    return ExitCode.DONE
