"""`paceline init recipe|script DIR`: writes a small project that trains, tests and verifies."""

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.errors import ExitCode, UsageError
from paceline.files import writing
from paceline.options.command_line import read_options
from paceline.options.fields import unknown_name
from paceline.options.text import printable

_PROJECTS = Path(__file__).parents[1] / "projects"
_SUFFIX = ".txt"  # so that tools for Python take them for no code of this package
_KINDS = ("recipe", "script")
_USAGE = "paceline init [recipe|script] [DIR]"
_ABOUT = (
    "Write a small project into DIR (by default here): a recipe, or a script with a loop of its "
    "own, with data, a test, settings and a README. It trains, tests and verifies itself by the "
    "commands that are printed; nothing that is there is overwritten."
)
_COMMAND = re.compile(r"^\$ (.+)$", re.MULTILINE)


def main(tokens: Sequence[str]) -> int:
    """Run the command."""
    place = next((i for i, word in enumerate(tokens) if word.startswith("-")), len(tokens))
    read_options(_USAGE, _ABOUT, tokens[place:], ())
    kind, where, *others = (*tokens[:place], *("recipe", ".")[place:])
    if others:
        raise UsageError(f"unexpected {others[0]!r}. Usage: {_USAGE}")
    if kind not in _KINDS:
        hint = f". For a recipe in {kind}: paceline init recipe {shlex.quote(kind)}"
        raise UsageError(unknown_name(kind, _KINDS, "kind of project") + hint)
    directory = Path(where).expanduser()
    names = write_project(kind, directory)
    print(printable(f"Written into {directory}: {', '.join(names)}. Try:"))
    if where != ".":
        print(printable(f"  cd {shlex.quote(where)}"))
    # The README has the commands to try.
    for command in _COMMAND.findall((directory / "README.md").read_text()):
        print(f"  {command}")
    return ExitCode.DONE


def write_project(kind: str, directory: Path) -> Sequence[str]:
    """Write a project's files, of which none may be there yet. Returns their names.

    Args:
        directory: Is made where it isn't there.

    Raises:
        UsageError: A file is there, or can't be written.
        StorageError: The disk is full.
    """
    templates = sorted((_PROJECTS / kind).glob(f"*{_SUFFIX}"))
    files = {directory / path.name.removesuffix(_SUFFIX): path.read_text() for path in templates}
    with writing(directory):
        # All or nothing: check every name before the first file is written.
        there = [path.name for path in files if path.exists() or path.is_symlink()]
        if there:
            raise UsageError(
                f"{directory} has {', '.join(there)} already, and nothing is overwritten: name a "
                f"new directory, such as paceline init {kind} my-training"
            )
        is_new, made = not directory.exists(), list[Path]()
        directory.mkdir(parents=True, exist_ok=True)
        try:
            for path, text in files.items():
                with path.open("x") as file:
                    made.append(path)
                    file.write(text)
        except OSError:  # the disk is full: a second try must not be refused
            for path in made:
                path.unlink()
            if is_new:
                with suppress(OSError):  # somebody else has put something there
                    directory.rmdir()
            raise
    return [path.name for path in files]
