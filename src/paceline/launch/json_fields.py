"""JSON that other programs answer with, read with the types it should have."""

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import final


@final
class Answer:
    """One JSON value, read by type. A missing field reads as empty, since AWS leaves those out."""

    def __init__(self, content: object) -> None:
        self._content = content

    def __getitem__(self, name: str) -> "Answer":
        return Answer(self._member(name))

    def __iter__(self) -> Iterator["Answer"]:
        return map(Answer, self._content if isinstance(self._content, list) else [])

    def __bool__(self) -> bool:
        return self._content not in (None, "", [], {}, False)

    def text(self, name: str) -> str:
        """Give a member as text; empty where there is none."""
        value = self._member(name)
        return "" if value is None else str(value)

    def number(self, name: str, default: float = 0.0) -> float:
        """Give a member as a number."""
        value = self._member(name)
        return float(value) if isinstance(value, int | float | str) else default

    def count(self, name: str, default: int = 0) -> int:
        """Give a member as a whole number."""
        return int(self.number(name, default))

    def time(self, name: str) -> datetime | None:
        """Give a member as a point in time."""
        value = self._member(name)
        return value if isinstance(value, datetime) else None

    def members(self) -> Mapping[str, "Answer"]:
        """Give all members by name."""
        content = self._content if isinstance(self._content, dict) else {}
        return {str(name): Answer(value) for name, value in content.items()}

    def texts(self) -> tuple[str, ...]:
        """Give a list of texts."""
        return tuple(str(item) for item in self._content) if isinstance(self._content, list) else ()

    def tags(self) -> Mapping[str, str]:
        """Give the member `Tags`, a list of keys with values, by key."""
        return {tag.text("Key"): tag.text("Value") for tag in self["Tags"]}

    def raw(self, name: str) -> object:
        """Give a member as boto3 does, such as a stream."""
        return self._member(name)

    def _member(self, name: str) -> object:
        return self._content.get(name) if isinstance(self._content, dict) else None
