"""JSON that AWS answers with, read with the types it should have."""

from collections.abc import Iterator
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

    def text(self, name: str) -> str:
        """Give a member as text; empty where there is none."""
        value = self._member(name)
        return "" if value is None else str(value)

    def count(self, name: str) -> int:
        """Return a member as a whole number; 0 if there is none."""
        value = self._member(name)
        return int(value) if isinstance(value, int | float | str) else 0

    def raw(self, name: str) -> object:
        """Give a member as boto3 does, such as a stream."""
        return self._member(name)

    def _member(self, name: str) -> object:
        return self._content.get(name) if isinstance(self._content, dict) else None
