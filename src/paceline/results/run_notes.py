"""Name, tags and note of a run: what its user calls it, and wants to remember of it.

The training writes those that it began with into `run.json`. What is changed later goes into
`notes.json`, which no training writes, so that neither can undo what the other writes.
"""

from dataclasses import dataclass
from typing import Self

from paceline.errors import UsageError
from paceline.files import write_json
from paceline.options.text import printable
from paceline.results.json_object import JsonObject, read_object, section, text, texts
from paceline.results.run_directory import RunDirectory

_NAME_BYTES, _TAG_BYTES, _NOTE_BYTES = 150, 100, 10_000


@dataclass(frozen=True, kw_only=True)
class RunNotes:
    """What a user calls a run; empty where they say nothing."""

    name: str = ""
    tags: tuple[str, ...] = ()
    note: str = ""

    def check(self) -> None:
        """Refuse what can't be shown in a line, or names nothing.

        Raises:
            UsageError: The message says which.
        """
        _check("--name", self.name, _NAME_BYTES)
        for tag in self.tags:
            _check("--tag", tag, _TAG_BYTES)
            if not tag or tag != tag.strip():
                raise UsageError(f"--tag {tag!r} is empty, or has a space at an end")
        _check("--note", self.note, _NOTE_BYTES)

    @classmethod
    def read(cls, run: RunDirectory, description: JsonObject, problems: list[str]) -> Self:
        """Read what there is: `notes.json`, else what the training began with.

        Args:
            problems: Gets a sentence where `notes.json` can't be read.
        """
        changed = read_object(run.notes_json, problems)
        if changed:
            tags = tuple(dict.fromkeys(texts(changed, "tags")))
            return cls(name=text(changed, "name"), tags=tags, note=text(changed, "note"))
        settings = section(description, "settings")
        tags = tuple(dict.fromkeys(texts(settings, "tag")))
        return cls(name=text(settings, "name"), tags=tags, note=text(settings, "note"))

    def write(self, run: RunDirectory) -> None:
        """Write them into `notes.json`, whole or not at all.

        Raises:
            OSError: The run directory can't be written.
        """
        content = {"name": self.name, "tags": list(self.tags), "note": self.note}
        write_json(run.notes_json, content)


def _check(flag: str, value: str, most_bytes: int) -> None:
    if printable(value) != value or "\n" in value:
        raise UsageError(f"{flag} {value!r} should be a line of text, without control characters")
    if len(value.encode()) > most_bytes:
        raise UsageError(f"{flag} has more than {most_bytes:,} bytes: {value[:40]!r}...")
