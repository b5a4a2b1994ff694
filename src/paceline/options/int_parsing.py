"""Whole numbers on the command line: one that isn't whole is refused, never rounded."""

from types import GenericAlias, UnionType
from typing import Annotated, Union, cast, final, get_args, get_origin

from paceline.options.fields import OptionValue


@final
class _WholeNumber(int):
    """What cyclopts makes of a token in place of `int`: its own conversion rounds `1.5` to 2."""


_WholeNumber.__name__ = "int"  # as which `--help` and errors show it


def strict(annotation: object) -> object:
    """Replace `int` wherever it stands in an annotation, so that `1.5` isn't taken for it."""
    if annotation is int:
        return _WholeNumber
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return Annotated[strict(parts[0]), *parts[1:]]
    if origin in (Union, UnionType):
        return Union[tuple(strict(part) for part in parts)]  # noqa: UP007  # made of a tuple
    if origin is tuple:
        return GenericAlias(tuple, tuple(strict(part) for part in parts))
    return annotation


def plain(value: OptionValue) -> OptionValue:
    """Give what was read by a strict annotation as ordinary numbers."""
    if isinstance(value, _WholeNumber):
        return int(value)
    if type(value) is tuple:
        return tuple(plain(cast(OptionValue, item)) for item in value)
    return value
