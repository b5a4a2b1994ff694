import pytest

from paceline.errors import UsageError
from paceline.options.durations import format_clock, format_duration, parse_duration_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90.0),
        ("45m", 2700.0),
        ("2h", 7200.0),
        ("1h30m", 5400.0),
        ("1d", 86400.0),
        (" 1H 30M ", 5400.0),
        ("1.5h", 5400.0),
        ("90", 90.0),
        ("0.5", 0.5),
    ],
)
def test_durations_as_people_write_them(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "0", "0s", "-5m", "5x", "h", "inf", "nan", "1e400"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(UsageError, match=r"not a duration: .*Write for example 90s, 45m, 2h"):
        parse_duration_s(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"),
        (9.94, "9.9 s"),
        (42.4, "42 s"),
        (59.7, "1 min"),
        (185, "3 min 5 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h"),
        (3727, "1 h 2 min"),
        (7199, "2 h"),
        (100_000, "27 h 47 min"),
    ],
)
def test_durations_as_people_read_them(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(9.94, "9.9 s"), (59.7, "1:00"), (185, "3:05"), (3599.6, "1:00:00"), (3727, "1:02:07")],
)
def test_durations_in_a_column(seconds: float, text: str) -> None:
    assert format_clock(seconds) == text
