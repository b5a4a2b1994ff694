"""Functions of other modules wrapped for a while, and put back."""

from collections.abc import Callable
from functools import wraps
from typing import Self, final


@final
class Patches:
    """Replaces attributes of classes and modules until its `with` block ends."""

    def __init__(self) -> None:
        self._before: list[tuple[object, str, object]] = []

    def __enter__(self) -> Self:
        return self

    def put(self, owner: object, name: str, value: object) -> None:
        """Put a value in an attribute's place."""
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def hook(self, owner: object, name: str, call: Callable[..., object]) -> None:
        """Have `call(original, *arguments, **named)` run in a function's place."""
        original = getattr(owner, name)

        @wraps(original)
        def around(*arguments: object, **named: object) -> object:
            return call(original, *arguments, **named)

        self.put(owner, name, around)

    def before(self, owner: object, name: str, note: Callable[..., object]) -> None:
        """Have `note(*arguments, **named)` run before a function."""

        def call(original: Callable[..., object], /, *arguments: object, **named: object) -> object:
            note(*arguments, **named)
            return original(*arguments, **named)

        self.hook(owner, name, call)

    def __exit__(self, *_: object) -> None:
        for owner, name, original in reversed(self._before):
            setattr(owner, name, original)
