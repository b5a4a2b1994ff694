import math
from collections.abc import Callable

import pytest

from paceline.options import figures
from paceline.options.figures import plural, show_bytes, show_loss, show_rate


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0.0000"),
        (0.51234, "0.5123"),
        (12.34567, "12.3457"),
        (0.0012345, "0.00123"),
        (0.000012345, "1.23e-5"),
        (123.456789, "123.457"),
        (1.2345e9, "1.23e9"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
    ],
)
def test_a_loss_keeps_three_digits_in_seven_characters(value: float, expected: str) -> None:
    assert show_loss(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(0.05, "0.05"), (1.0, "1"), (0.00125, "0.00125"), (0.00012345, "1.23e-4"), (1e-9, "1e-9")],
)
def test_a_rate(value: float, expected: str) -> None:
    assert show_rate(value) == expected


@pytest.mark.parametrize(
    ("amount", "expected"), [(0, "0 steps"), (1, "1 step"), (1234, "1,234 steps")]
)
def test_plural(amount: int, expected: str) -> None:
    assert plural(amount, "step") == expected


@pytest.mark.parametrize(
    ("amount", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_500, "1.5 kB"),
        (9_990, "10 kB"),
        (999_600, "1.0 MB"),
        (46_758_048, "47 MB"),
        (1.2e9, "1.2 GB"),
        (3.4e12, "3.4 TB"),
    ],
)
def test_bytes_have_at_most_three_digits(amount: float, expected: str) -> None:
    assert show_bytes(amount) == expected


@pytest.mark.parametrize(
    ("write", "value", "expected"),
    [
        (figures.show_bandwidth, 1.25e9, "10 Gbit/s"),
        (figures.show_bandwidth, 117.6e6, "941 Mbit/s"),
        (figures.show_bandwidth, 1e3, "8 kbit/s"),
        (figures.show_time, 85e-6, "85 µs"),
        (figures.show_time, 1.2e-3, "1.2 ms"),
        (figures.show_time, 3.0, "3 s"),
        (figures.show_seconds, 0.0123, "12 ms"),
        (figures.show_seconds, 185.0, "3 min 5 s"),
        (figures.show_length, 0.5, "0.5 s"),
        (figures.show_percent, 0.975, "97.50 %"),
        (figures.show_whole_percent, 0.046, "4.6 %"),
        (figures.show_three_digits, 1294.2, "1,294"),
        (figures.show_milliseconds, 0.04, "40.0"),
        (figures.show_milliseconds, 1.2942, "1,294"),
        (figures.show_value, {"a": [1, None, True], "b": 0.1}, "a: 1, none, yes, b: 0.1"),
    ],
)
def test_figures_are_written_in_few_characters(
    write: Callable[[object], str], value: object, expected: str
) -> None:
    assert write(value) == expected


def test_what_is_not_known_is_a_dash() -> None:
    writers = (figures.show_seconds, figures.show_percent, figures.dashed(show_loss))
    assert {write(value) for write in writers for value in (None, math.nan)} == {figures.NOTHING}
    assert figures.dashed(show_loss)(0.5) == "0.5000"
    assert [figures.listed(words) for words in ([], ["a"], ["a", "b", "c"])] == [
        *("", "a", "a, b and c")
    ]
