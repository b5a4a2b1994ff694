"""Text for a terminal: that of others made fit for it, and tables and paragraphs of our own."""

import re
import sys
from collections.abc import Container, Sequence
from contextlib import suppress
from textwrap import wrap

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters besides tab and newline: escape sequences
    "\u200e\u200f\u202a-\u202e\u2066-\u2069"  # these turn the direction of what follows around
    "\ud800-\udfff]"  # bytes of a name that isn't UTF-8; no stream could encode them
)
_LONG_WORD = re.compile(r"\S{400,}")
_KEPT = 100


def printable(text: str) -> str:
    """Write what a terminal would interpret, or couldn't show, as escapes such as `\\x1b`.

    Args:
        text: Of any origin; its lines stay lines.
    """
    return _UNPRINTABLE.sub(_escaped, text)


def say(text: str) -> None:
    """Print to stderr, at once; a stderr that is gone costs nothing but the text."""
    with suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)


def shortened(text: str) -> str:
    """Cut words of 400 characters and more, such as a number of 5,000 digits."""
    return _LONG_WORD.sub(lambda found: f"{found[0][:_KEPT]}… ({len(found[0]):,} characters)", text)


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Break a text into lines without breaking a word, a name with hyphens, or `3.6 %`.

    Args:
        text: One paragraph.
        width: Characters of a line.
        indent: Before each line but the first.
    """
    whole = text.replace(" %", "\u00a0%")
    lines = wrap(
        whole, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\u00a0", " ") for line in lines]


def aligned(rows: Sequence[Sequence[str]], left: Container[int] = ()) -> list[str]:
    """Lay out a table's lines: figures to the right, and to the left what stands in columns `left`.

    Args:
        rows: All of the same length, the heading first.
        left: Numbers of columns.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # as Python keeps a byte that it can't decode
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
