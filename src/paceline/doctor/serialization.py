"""Facts that pass between hosts as JSON, read back into their dataclasses."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import TypeVar, Union, cast, get_args, get_origin, get_type_hints

from paceline.options.fields import fits

Shape = TypeVar("Shape")


def read(shape: type[Shape], content: object) -> Shape:
    """Read a dataclass from JSON.

    A host may have another version of Paceline, which is to be found and not to be tripped over:
    names that are unknown here don't count, and what is missing keeps its default.

    Args:
        shape: A dataclass whose fields all have defaults.
        content: What `json.loads` gave.

    Raises:
        ValueError: A value is of another type than it should be.
    """
    if not isinstance(content, Mapping):
        raise ValueError(f"{shape.__name__} should be an object, not {content!r}")
    hints = get_type_hints(shape)
    names = [f.name for f in fields(shape) if f.name in content]  # type: ignore[arg-type]  # any dataclass
    return shape(**{name: _value(hints[name], content[name], name) for name in names})


def _value(hint: object, content: object, name: str) -> object:
    parts = get_args(hint)
    if get_origin(hint) in (Union, UnionType):
        return _first_that_fits(parts, content, name)
    if get_origin(hint) is tuple and isinstance(content, list):
        kinds = parts[:1] * len(content) if parts[-1] is Ellipsis else parts
        return tuple(_value(k, item, name) for k, item in zip(kinds, content, strict=True))
    if get_origin(hint) is Mapping and isinstance(content, Mapping):
        return {str(key): _value(parts[1], value, name) for key, value in content.items()}
    if is_dataclass(hint):
        return read(cast(type[object], hint), content)
    if not fits(content, hint):
        raise ValueError(f"{name} is {content!r}")
    return content


def _first_that_fits(hints: Sequence[object], content: object, name: str) -> object:
    for hint in hints:
        with suppress(ValueError):
            return _value(hint, content, name)
    raise ValueError(f"{name} is {content!r}")
