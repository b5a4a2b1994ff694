from dataclasses import dataclass

import pytest

from paceline.config.fields import check_names, differences, option_fields, unknown_name
from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class Options:
    """Some options."""

    width: int = 3
    """How wide,
    in pixels."""

    name: str | None = None
    """What it is called."""


def test_fields_with_their_docstrings() -> None:
    width, name = option_fields(Options, "Shape")
    assert (width.name, width.annotation, width.default) == ("width", int, 3)
    assert (width.help, width.group) == ("How wide, in pixels.", "Shape")
    assert (name.annotation, name.default) == (str | None, None)


def test_a_field_needs_a_default_and_a_docstring() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Undescribed:
        width: int = 3

    @dataclass(frozen=True, kw_only=True)
    class Required:
        width: int
        """How wide."""

    for component in (Undescribed, Required):
        with pytest.raises(TypeError, match="width needs a default and a docstring"):
            option_fields(component, "Shape")


def test_unknown_names() -> None:
    check_names(["a"], ["b", "a"], "letter")
    with pytest.raises(UsageError, match=r"^unknown letter 'c'\. Known: a, b$"):
        check_names(["a", "c"], ["b", "a"], "letter")
    assert unknown_name("widthh", ["width", "name"], "option") == (
        "unknown option 'widthh'. Did you mean 'width'? Known: name, width"
    )


def test_differences_between_settings() -> None:
    before, after = {"a": 1, "b": 2, "c": None}, {"a": 1, "b": 3, "d": 4}
    assert differences(before, after) == {"b": (2, 3), "d": (None, 4)}
