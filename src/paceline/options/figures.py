"""Formats numbers for people: times, rates, sizes, losses. Imports no torch."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps

from paceline.options.durations import format_duration

NOTHING = "–"  # noqa: RUF001 (an en dash, as a table has it)
_EXPONENT = re.compile(r"e([+-])0*")


def dashed(write: Callable[[float], str]) -> Callable[[float | None], str]:
    """Decorate a formatter: None and NaN become a dash."""

    @wraps(write)
    def shown(value: float | None) -> str:
        return NOTHING if value is None or math.isnan(value) else write(value)

    return shown


def show_loss(value: float) -> str:
    """Write a loss in seven characters (one more where it is negative), with at least three digits.

    `0.5123`, and where four decimals would say too little or too much `0.00123`, `1.23e-5`,
    `123.457`, `1.23e9`.
    """
    size = abs(value)
    if size == 0 or 0.01 <= size < 100:
        return f"{value:.4f}"
    return _short(value, 6 if 100 <= size < 1e5 else 3)


def show_rate(value: float) -> str:
    """Write a learning rate in seven characters, with three digits: `0.05`, `1.23e-4`."""
    plain = _short(value, 3)
    return plain if len(plain) <= 7 else _EXPONENT.sub(r"e\1", f"{value:.2e}")


def show_bytes(amount: float) -> str:
    """Write a number of bytes with three digits at most: `512 B`, `1.5 MB`, `12 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.{0 if unit == 'B' or amount >= 9.95 else 1}f} {unit}"
        amount /= 1000
    return f"{amount:.1f} TB"


def show_bandwidth(bytes_per_s: float) -> str:
    """Write a network's speed, in bits as networks are sold: `941 Mbit/s`, `9.4 Gbit/s`."""
    bits = bytes_per_s * 8
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= 0.9995 * size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def show_time(seconds: float) -> str:
    """Write a short time: `85 µs`, `1.2 ms`, `3 s`."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} µs"


@dashed
def show_seconds(seconds: float) -> str:
    """Write a time that may be short or long: `12 ms`, `0.93 s`, `42 s`, `3:05`."""
    if 0 < seconds < 0.0995:
        return f"{1000 * seconds:.2g} ms"
    return f"{seconds:.2f} s" if 0 < seconds < 9.95 else format_duration(seconds)


@dashed
def show_length(seconds: float) -> str:
    """Write a length of time that someone chose: `20 s`, `0.5 s`, `2:00`."""
    return f"{seconds:g} s" if seconds < 60 else format_duration(seconds)


@dashed
def show_percent(fraction: float) -> str:
    """Write a fraction as `97.50 %`."""
    return f"{fraction:.2%}".replace("%", " %")


def show_short_percent(fraction: float) -> str:
    """Write a fraction without needless digits: `97.5 %`."""
    return f"{100 * fraction:.6g} %"


@dashed
def show_whole_percent(fraction: float) -> str:
    """Write a fraction as `46 %`, below ten in a hundred as `4.6 %`."""
    digits = 1 if 0.0005 <= abs(fraction) < 0.0995 else 0
    return f"{fraction:.{digits}%}".replace("%", " %")


@dashed
def show_count(value: float) -> str:
    """Write a count with thousands separated: `12,345`."""
    return f"{value:,.0f}"


@dashed
def show_speed(value: float) -> str:
    """Write samples per second: `812`, `12,345`, and one decimal below ten."""
    return f"{value:.1f}" if abs(value) < 10 else f"{value:,.0f}"


@dashed
def show_three_digits(value: float) -> str:
    """Write a measured figure with three digits: `39.6`, `155`, `1,294`."""
    return f"{value:,.0f}" if abs(value) >= 99.5 else f"{value:#.3g}"


@dashed
def show_milliseconds(seconds: float) -> str:
    """Write a measured time in milliseconds, with three digits and without the unit."""
    return show_three_digits(1000 * seconds)


def show_times(factor: float) -> str:
    """Write a factor as `3.7 times`, from ten on `12 times`."""
    return f"{factor:.1f} times" if factor < 9.95 else f"{factor:,.0f} times"


def show_value(content: object) -> str:
    """Write a setting of any JSON type."""
    if content is None or content == "":
        return "none"
    if isinstance(content, bool):
        return "yes" if content else "no"
    if isinstance(content, list | tuple):
        return ", ".join(show_value(item) for item in content) or "none"
    if isinstance(content, Mapping):
        return ", ".join(f"{key}: {show_value(item)}" for key, item in content.items()) or "none"
    return f"{content:.10g}" if isinstance(content, float) else str(content)


def plural(amount: int, noun: str) -> str:
    """Write `1 epoch`, `2 epochs`."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def listed(words: Sequence[str], last: str = "and") -> str:
    """Write `one`, `one and two`, `one, two and three`, or another word before the last."""
    return f" {last} ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def _short(value: float, digits: int) -> str:
    """Write a number with so many digits at most, and its exponent without needless zeros."""
    return _EXPONENT.sub(r"e\1", f"{value:.{digits}g}").replace("e+", "e")
