"""What people write for speeds, short times and sizes."""

import pytest

from paceline.errors import UsageError
from paceline.options.quantities import parse_bandwidth_bytes_per_s, parse_short_time_s, parse_sizes


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("25gbit", 25e9 / 8),
        ("25Gbit/s", 25e9 / 8),
        ("10Gbps", 1.25e9),
        ("10 gbps", 1.25e9),
        ("1.2GB/s", 1.2e9),
        ("1.2 GBps", 1.2e9),
        ("100Mb/s", 12.5e6),
        ("334 mbit", 334e6 / 8),
        ("1e3kbit", 125e3),
        ("8bit", 1.0),
    ],
)
def test_speeds(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth_bytes_per_s(text) == pytest.approx(bytes_per_s)


@pytest.mark.parametrize(
    "text",
    ["", "25", "fast", "gbit", "-1gbit", "0gbit", "25 furlongs", "25GB", "25gb", "1e999gbit"],
)
def test_what_isnt_a_speed(text: str) -> None:
    with pytest.raises(UsageError, match=r"not a network's speed.*25gbit or 1\.2GB/s"):
        parse_bandwidth_bytes_per_s(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("50us", 50e-6), ("50 µs", 50e-6), ("0.2ms", 2e-4), ("1s", 1.0), ("100ns", 1e-7), ("0", 0.0)],
)
def test_short_times(text: str, seconds: float) -> None:
    assert parse_short_time_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "50", "soon", "-1ms", "5m", "1h", "1e999s"])
def test_what_isnt_a_short_time(text: str) -> None:
    with pytest.raises(UsageError, match=r"not a time.*50us, 0\.2ms or 1s"):
        parse_short_time_s(text)


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("8", (8,)),
        ("8,1, 4,8", (1, 4, 8)),
        ("2..16", (2, 4, 8, 16)),
        ("1,3..10", (1, 3, 6, 10)),
        ("5..5", (5,)),
    ],
)
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["", "0", "-2", "2..", "..8", "many", "1.5", "2-8"])
def test_what_isnt_a_list_of_sizes(text: str) -> None:
    with pytest.raises(UsageError, match=r"not numbers of nodes"):
        parse_sizes(text)


def test_a_range_that_ends_before_it_begins() -> None:
    with pytest.raises(UsageError, match=r"Write 2\.\.8"):
        parse_sizes("8..2")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fast", "begins with no number"),
        ("25", "has no unit"),
        ("25gb", "'gb' may be bits or bytes"),
        ("25parsec", "unit 'parsec' is unknown"),
        ("0gbit", "above 0"),
    ],
)
def test_what_is_wrong_with_a_speed_is_said(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_bandwidth_bytes_per_s(text)


def test_what_is_wrong_with_times_and_numbers_is_said() -> None:
    with pytest.raises(UsageError, match="'5', which has no unit"):
        parse_short_time_s("5")
    with pytest.raises(UsageError, match=r"'1,2\.\.x', where '2\.\.x' is no whole number"):
        parse_sizes("1,2..x")
    with pytest.raises(UsageError, match="where '0' is not from 1 to 1,000,000"):
        parse_sizes("4,0")
