"""Figures as people read them, in few characters."""

import re

_EXPONENT = re.compile(r"e([+-])0*")


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


def plural(amount: int, noun: str) -> str:
    """Write `1 epoch`, `2 epochs`."""
    return f"{amount:,} {noun}" if amount == 1 else f"{amount:,} {noun}s"


def _short(value: float, digits: int) -> str:
    """Write a number with so many digits at most, and its exponent without needless zeros."""
    return _EXPONENT.sub(r"e\1", f"{value:.{digits}g}").replace("e+", "e")
