"""What was found, as GitHub Actions shows it at its line of the script (`--format github`)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict, cast

_ESCAPED = {"%": "%25", "\r": "%0D", "\n": "%0A"}
_ESCAPED_IN_PROPERTIES = {**_ESCAPED, ":": "%3A", ",": "%2C"}
"""docs.github.com, "Workflow commands for GitHub Actions"; actions/toolkit, `command.ts`."""


class _Line(TypedDict):
    file: str
    line: int


class _Finding(TypedDict):
    cause: str
    is_fault: bool
    what: str
    why: str
    lines: Sequence[_Line]


def github_annotations(found: Mapping[str, object], directory: Path) -> str:
    """Write a line for each finding: an error, or a notice for a note.

    Args:
        found: What `--json` writes.
        directory: Somewhere in the repository, from whose root GitHub counts files.
    """
    findings = cast(Sequence[_Finding], found["findings"])
    lines = [_annotation(finding, _root(directory)) for finding in findings]
    if not (found["is_good"] or any(finding["is_fault"] for finding in findings)):
        lines.append(f"::error title=paceline verify::{_escaped(str(found['verdict']), _ESCAPED)}")
    return "\n".join(lines)


def _annotation(finding: _Finding, root: Path) -> str:
    kind = "error" if finding["is_fault"] else "notice"
    named = [line for line in finding["lines"] if Path(line["file"]).is_relative_to(root)][:1]
    places = [(Path(line["file"]).relative_to(root), line["line"]) for line in named]
    given = [f"file={_escaped(file, _ESCAPED_IN_PROPERTIES)},line={line}," for file, line in places]
    title = f"title=paceline verify%3A {finding['cause']}"
    text = _escaped(f"{finding['what']}\nwhy: {finding['why']}", _ESCAPED)
    return f"::{kind} {''.join(given)}{title}::{text}"


def _root(directory: Path) -> Path:
    above = (directory, *directory.parents)
    return next((path for path in above if (path / ".git").exists()), directory)


def _escaped(text: object, characters: Mapping[str, str]) -> str:
    return "".join(characters.get(character, character) for character in str(text))
