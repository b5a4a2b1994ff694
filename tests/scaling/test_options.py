"""What a user may say about a study."""

import pytest

from paceline.errors import UsageError
from paceline.scaling.options import (
    ScaleOptions,
    parse_methods,
    parse_workers,
    usual_workers,
)


def test_numbers_of_workers() -> None:
    assert parse_workers("8, 1,2") == (1, 2, 8)
    assert parse_workers("4") == (4,)
    assert parse_workers("1..6") == (1, 2, 4, 6)
    assert parse_workers(None) == ()


def test_methods_keep_their_order() -> None:
    assert parse_methods("powersgd, allreduce") == ("powersgd", "allreduce")
    assert parse_methods(None) == ()


@pytest.mark.parametrize(("most", "chosen"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6))])
def test_usual_numbers(most: int, chosen: tuple[int, ...]) -> None:
    assert usual_workers(most) == chosen


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": "1,zwei"}, "not numbers of workers"),
        ({"workers": "1,,2"}, "not numbers of workers"),
        ({"workers": ""}, "not numbers of workers"),
        ({"workers": "0"}, "not numbers of workers"),
        ({"methods": "allreduce,fast"}, "'fast' is none. Known: allreduce, ordered, powersgd"),
        ({"methods": "ordered,ordered"}, "ordered stands there twice"),
        ({"repeats": 0}, "--repeats must be at least 1, not 0"),
        ({"seconds": 0.5}, "--seconds must be at least 1, not 0.5"),
        ({"seconds": float("nan")}, "--seconds must be at least 1, not nan"),
    ],
)
def test_what_is_wrong_is_said(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ScaleOptions(**options)  # type: ignore[arg-type]
