"""Text of others (names, paths, error messages, what a script printed) made fit for a terminal."""

import re

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


def shortened(text: str) -> str:
    """Cut words of 400 characters and more, such as a number of 5,000 digits."""
    return _LONG_WORD.sub(lambda found: f"{found[0][:_KEPT]}… ({len(found[0]):,} characters)", text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # as Python keeps a byte that it can't decode
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
