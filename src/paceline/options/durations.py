"""Parses and formats durations such as `90s`, `45m`, `2h` or `1h30m`."""

import re
from functools import cache

from paceline.errors import UsageError

MIN_S, MAX_S = 1e-3, 9999 * 86400.0
"""What clocks, dates and other programs can be asked to wait for."""
MAX_WAIT_S = 864_000.0
"""Ten days, the most that a wait may take: sockets count milliseconds in 32 bits, which is 24."""
_UNITS_S = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[dhms])+")
_PART = re.compile(r"(\d+(?:\.\d+)?)([dhms])")


@cache  # asked for after every step
def parse_duration_s(text: str, option: str = "") -> float:
    """Read a duration such as `2h`, `1h30m` or `90` (plain numbers are seconds).

    Returns:
        Seconds, greater than zero.

    Raises:
        UsageError: The text isn't a positive duration.
    """
    compact = text.strip().lower().replace(" ", "")
    if _DURATION.fullmatch(compact):
        total_s = sum(float(number) * _UNITS_S[unit] for number, unit in _PART.findall(compact))
    else:
        try:
            total_s = float(compact)
        except ValueError:
            total_s = 0.0
    if not 0.0 < total_s < float("inf"):
        problem = f"{option} is {text!r}, not a duration" if option else f"not a duration: {text!r}"
        raise UsageError(f"{problem}. Write for example 90s, 45m, 2h or 1h30m; it must be above 0")
    if not MIN_S <= total_s <= MAX_S:
        named = f"{option} is {text!r}: it" if option else f"the duration {text!r}"
        raise UsageError(f"{named} should be from 1 ms to 9,999 days")
    return total_s


def format_duration(seconds: float) -> str:
    """Write a duration in a sentence: `0.8 s`, `42 s`, `3 min 5 s`, `1 h 2 min`."""
    whole = round(seconds)
    if whole < 60:
        return format_clock(seconds)
    if whole < 3600:
        minutes, rest = divmod(whole, 60)
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, rest = divmod(round(whole / 60), 60)  # of hours the seconds say nothing
    return f"{hours:,} h {rest} min" if rest else f"{hours:,} h"


def format_clock(seconds: float) -> str:
    """Write a duration in a column, or a line that is redrawn: `42 s`, `3:05`, `1:02:07`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"
