"""Numbers and values as people read them; a dash where there is nothing to say."""

import math
from collections.abc import Mapping, Sequence

from paceline.options.durations import format_duration
from paceline.options.figures import show_loss

NOTHING = "–"  # noqa: RUF001 (an en dash, as a table has it)


def percent(fraction: float | None) -> str:
    """Write a fraction as `97.50 %`."""
    return NOTHING if _absent(fraction) else f"{fraction:.2%}".replace("%", " %")


def short_percent(fraction: float) -> str:
    """Write a fraction without needless digits: `97.5 %`."""
    return f"{100 * fraction:.6g} %"


def loss(value: float | None) -> str:
    """Write a loss as the terminal shows it."""
    return NOTHING if value is None or math.isnan(value) else show_loss(value)


def count(value: float | None) -> str:
    """Write a count with thousands separated: `12,345`."""
    return NOTHING if _absent(value) else f"{value:,.0f}"


def rate(value: float | None) -> str:
    """Write a learning rate with four digits at most."""
    return NOTHING if _absent(value) else f"{value:.4g}"


def speed(value: float | None) -> str:
    """Write samples per second: `812`, `12,345`, and one decimal below ten."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:.1f}" if abs(value) < 10 else f"{value:,.0f}"


def milliseconds(seconds: float | None) -> str:
    """Write seconds as milliseconds, without the unit."""
    if seconds is None or math.isnan(seconds):
        return NOTHING
    return f"{1000 * seconds:.2f}" if abs(seconds) < 1 else f"{1000 * seconds:,.0f}"


def whole_percent(fraction: float | None) -> str:
    """Write a fraction as `46 %`, below ten in a hundred as `4.6 %`."""
    if fraction is None or math.isnan(fraction):
        return NOTHING
    digits = 1 if 0.0005 <= abs(fraction) < 0.0995 else 0
    return f"{fraction:.{digits}%}".replace("%", " %")


def seconds(time_s: float | None) -> str:
    """Write a time as `12 ms`, `0.93 s`, `42 s`, `3:05`."""
    if time_s is None or math.isnan(time_s):
        return NOTHING
    if 0 < time_s < 0.0995:
        return f"{1000 * time_s:.2g} ms"
    return f"{time_s:.2f} s" if 0 < time_s < 9.95 else format_duration(time_s)


def length(time_s: float | None) -> str:
    """Write a length that someone chose: `20 s`, `0.5 s`, `2:00`."""
    if time_s is None or math.isnan(time_s):
        return NOTHING
    return f"{time_s:g} s" if time_s < 60 else format_duration(time_s)


def three_digits(value: float | None) -> str:
    """Write a measured figure with three digits: `39.6`, `155`, `1,294`."""
    if value is None or math.isnan(value):
        return NOTHING
    return f"{value:,.0f}" if abs(value) >= 99.5 else f"{value:#.3g}"


def times(factor: float) -> str:
    """Write a factor as `3.7 times`, from ten on `12 times`."""
    return f"{factor:.1f} times" if factor < 9.95 else f"{factor:,.0f} times"


def listed(words: Sequence[str]) -> str:
    """Write `one`, `one and two`, `one, two and three`."""
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def value(content: object) -> str:
    """Write a setting of any JSON type."""
    if content is None or content == "":
        return "none"
    if isinstance(content, bool):
        return "yes" if content else "no"
    if isinstance(content, list | tuple):
        return ", ".join(value(item) for item in content) or "none"
    if isinstance(content, Mapping):
        return ", ".join(f"{key}: {value(item)}" for key, item in content.items()) or "none"
    return f"{content:.10g}" if isinstance(content, float) else str(content)


def _absent(number: float | None) -> bool:
    return number is None or math.isnan(number)
