"""Functions of other modules wrapped for a while, and put back."""

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import final


@final
class Patches(ExitStack):
    """Replaces attributes of classes and modules until its `with` block ends.

    Whatever else has to be undone then can be added, as to any `ExitStack`.
    """

    def put(self, owner: object, name: str, value: object) -> None:
        """Replace an attribute."""
        self.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, value)

    def hook(self, owner: object, name: str, call: Callable[..., object]) -> None:
        """Have `call(original, *arguments, **named)` run instead of a function."""
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

    def after(self, owner: object, name: str, note: Callable[..., object]) -> None:
        """Have `note(result, *arguments, **named)` run after a function that raised no error."""

        def call(original: Callable[..., object], /, *arguments: object, **named: object) -> object:
            result = original(*arguments, **named)
            note(result, *arguments, **named)
            return result

        self.hook(owner, name, call)
