"""Whole numbers are taken exactly or refused."""

from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.options.command_line import read_options
from paceline.options.fields import OptionField, OptionValue


def parse(annotation: object, *tokens: str) -> OptionValue:
    field = OptionField(name="count", annotation=annotation, default=None, help="", group="G")
    return read_options("test", "", [f"--count={tokens[0]}", *tokens[1:]], [field]).values["count"]


@pytest.mark.parametrize(
    ("annotation", "tokens", "expected"),
    [
        (int, ["3"], 3),
        (int, ["-3"], -3),
        (int | None, ["none"], None),
        (int | None, ["123456789012"], 123456789012),
        (int | float, ["1.5"], 1.5),
        (tuple[int, float], ["1", "2.5"], (1, 2.5)),
        (tuple[int, ...], ["1", "--count=2"], (1, 2)),
        (Path, ["1.5"], Path("1.5")),
    ],
    ids=str,
)
def test_what_is_taken(annotation: object, tokens: list[str], expected: OptionValue) -> None:
    found = parse(annotation, *tokens)
    assert found == expected
    assert type(found) is type(expected)
    if isinstance(expected, tuple) and isinstance(found, tuple):
        assert [type(item) for item in found] == [type(item) for item in expected]


@pytest.mark.parametrize(
    "annotation", [int, int | None, tuple[int, float], tuple[int, ...]], ids=str
)
def test_what_isnt_whole_is_refused(annotation: object) -> None:
    with pytest.raises(UsageError, match=r"is '1.5'; it must be a whole number"):
        parse(annotation, "1.5", *(["2.5"] if annotation == tuple[int, float] else []))


def test_the_environment_is_no_way_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_COUNT", "1.5")
    field = OptionField(name="count", annotation=int, default=1, help="", group="G")
    with pytest.raises(UsageError, match=r"PACELINE_COUNT is '1.5'; it must be a whole number"):
        read_options("test", "", [], [field])
