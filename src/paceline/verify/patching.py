"""Functions of other modules wrapped for a while, and put back."""

from collections.abc import Callable
from typing import Self, final


@final
class Patches:
    """Wraps attributes of classes and modules until its `with` block ends."""

    def __init__(self) -> None:
        self._before: list[tuple[object, str, object]] = []

    def __enter__(self) -> Self:
        return self

    def wrap(
        self,
        owner: object,
        name: str,
        around: Callable[[Callable[..., object]], Callable[..., object]],
    ) -> None:
        """Put what `around` makes of a function in its place."""
        original = getattr(owner, name)
        self._before.append((owner, name, original))
        setattr(owner, name, around(original))

    def __exit__(self, *_: object) -> None:
        for owner, name, original in reversed(self._before):
            setattr(owner, name, original)
