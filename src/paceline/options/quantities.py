"""Parses bandwidths and short times such as `25gbit`, `1.2GB/s` or `50us`."""

import re
from math import isfinite

from paceline.errors import UsageError

_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)\s*(.*)", re.IGNORECASE | re.DOTALL)
_COUNT = re.compile(r"[0-9]{1,12}")
_MAX_THINGS = 1_000_000
_SPEED = re.compile(r"([kmgt]?)(bit|bits|bps|b)(/s|ps)?", re.IGNORECASE)
_SCALE = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_bandwidth_bytes_per_s(text: str) -> float:
    """Read a network's speed: `25gbit`, `10Gbps`, `10 Gbit/s` (bits), `1.2GB/s` (bytes).

    Raises:
        UsageError: It isn't one, or doesn't say whether bits or bytes are meant.
    """
    number, unit = _number_and_unit(text)
    match = _SPEED.fullmatch(unit)
    value = number * _scale(match) if match else 0.0
    if not 0 < value < float("inf"):
        raise UsageError(
            f"not a network's speed: {text!r}{_why_no_speed(number, unit)}. Write for example "
            "25gbit or 1.2GB/s"
        )
    return value


def _why_no_speed(number: float, unit: str) -> str:
    if number < 0:
        return ", which begins with no number"
    if not unit:
        return ", which has no unit"
    if _SPEED.fullmatch(unit) is None:
        return f", whose unit {unit!r} is unknown"
    if not 0 < number < float("inf"):
        return ", which must be above 0 and finite"
    return f", where {unit!r} may be bits or bytes"


def _scale(match: re.Match[str]) -> float:
    """Give the bytes per second of a unit; 0 where bits can't be told from bytes."""
    prefix, noun, per = match.groups()
    scale = _SCALE[prefix.lower()]
    if noun.lower() in ("bit", "bits"):
        return scale / 8
    if noun[0] == "B":
        return scale if per or noun.lower() == "bps" else 0.0
    # `gb` alone may be either, while `gbps` and `Gb/s` are bits wherever networks are sold
    return scale / 8 if per or noun.lower() == "bps" else 0.0


def parse_short_time_s(text: str) -> float:
    """Read a time such as `50us`, `0.2ms` or `1s`; `0` is one, too.

    Raises:
        UsageError: It isn't one, or has no unit.
    """
    number, unit = _number_and_unit(text)
    if number == 0 and not unit:
        return 0.0
    if unit.lower() not in _TIMES_S or not isfinite(number):
        why = ", which has no unit" if number >= 0 and not unit else ""
        raise UsageError(f"not a time: {text!r}{why}. Write for example 50us, 0.2ms or 1s")
    return number * _TIMES_S[unit.lower()]


def _number_and_unit(text: str) -> tuple[float, str]:
    match = _NUMBER.fullmatch(text.strip())
    return (float(match[1]), match[2].strip()) if match else (-1.0, "?")


def parse_count(text: str) -> int | None:
    """Read a whole number of at most 12 digits; None where it is something else.

    `int` reads digits of all scripts, signs and underscores, and fails where there are too many.
    """
    return int(text) if _COUNT.fullmatch(text) else None


def parse_sizes(text: str, things: str = "nodes") -> tuple[int, ...]:
    """Read whole numbers: `8`, `1,2,4,8`, or doubled from the first to the last, `2..1024`.

    Returns:
        Each once, ascending.

    Raises:
        UsageError: It is something else, or one of them is below 1.
    """
    sizes: set[int] = set()
    for word in text.split(","):
        first, dots, last = word.strip().partition("..")
        size = parse_count(first)
        most = parse_count(last) if dots else size
        if not size or most is None or max(size, most) > _MAX_THINGS:
            wrong = "no whole number" if None in (size, most) else f"not from 1 to {_MAX_THINGS:,}"
            raise UsageError(
                f"not numbers of {things}: {text!r}, where {word.strip()!r} is {wrong}. Write for "
                "example 1,2,4,8 or 2..1024"
            )
        if most < size:
            raise UsageError(f"{word.strip()!r} ends below its beginning. Write {most}..{size}")
        # Doubled up to the last one, which is always among them.
        while size < most:
            sizes.add(size)
            size *= 2
        sizes.add(most)
    return tuple(sorted(sizes))
