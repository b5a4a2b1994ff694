"""Parts of JSON that anybody may have written."""

import math

import pytest

from paceline.results.json_object import number


@pytest.mark.parametrize("value", [None, True, "3", math.nan, math.inf, 10**400])
def test_number_is_finite_or_none(value: object) -> None:
    assert number({"x": value}, "x") is None
