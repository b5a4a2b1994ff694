"""Text for terminals: escapes foreign text, lays out tables and paragraphs."""

import re
import shutil
import sys
from collections.abc import Container, Sequence
from contextlib import suppress
from textwrap import wrap
from typing import TextIO

_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters besides tab and newline: escape sequences
    "\u200e\u200f\u202a-\u202e\u2066-\u2069"  # these turn the direction of what follows around
    "\ud800-\udfff]"  # bytes of a name that isn't UTF-8; no stream could encode them
)
_LONG_WORD = re.compile(r"\S{400,}")
_FIGURE = re.compile(
    r"\bETA (?=\d)|\d+ h \d+ min\b|\d+ min \d+ s\b|\d (?:h|min|s|ms|[kMGT]?B)\b| %"
)
_KEPT = 100
_LABEL = re.compile(r" {2}[a-z]+ +(?=\S)|Paceline \S+: (?=\S)")
_COMMAND = re.compile(
    r"paceline [a-z]+(?: [a-z]\w*(?= --))?"
    r"(?: (?:--?[\w-]+(?:[= ][^\s-]\S*)?|\S*[/=]\S*|[A-Z_]{2,}\b|\.\.\.))*"
)


def printable(text: str) -> str:
    """Write what a terminal would interpret, or couldn't show, as escapes such as `\\x1b`.

    Args:
        text: Of any origin; its lines stay lines.
    """
    return _UNPRINTABLE.sub(_escaped, text)


def print_stderr(text: str) -> None:
    """Print to stderr, at once, above the progress that another process may be showing there.

    A stderr that is gone costs nothing but the text.
    """
    with suppress(OSError):
        print(above_progress(printable(text)), file=sys.stderr, flush=True)


def cut(text: str, most: int) -> str:
    """Cut a text to so many characters, with an ellipsis at its end."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def shortened(text: str) -> str:
    """Cut words of 400 characters and more, such as a number of 5,000 digits."""
    return _LONG_WORD.sub(lambda match: f"{match[0][:_KEPT]}… ({len(match[0]):,} characters)", text)


def clause(said: object) -> str:
    """Give somebody else's message as a part of a sentence of ours: without a full stop at its end.

    Args:
        said: A message, or an error; an error that says nothing is named by its type.
    """
    text = str(said).strip().rstrip(" .:;,")
    return text or (type(said).__name__ if isinstance(said, BaseException) else "no message")


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Break a text into lines that break no word, no name with hyphens, and no figure off its unit.

    A command of ours stays in one line where it fits one, so that it can be copied.

    Args:
        indent: Before each line but the first.
    """
    room = width - len(indent)
    whole = _COMMAND.sub(
        lambda match: _in_one(match) if len(match[0]) < room else match[0],
        _FIGURE.sub(_in_one, text),
    )
    lines = wrap(
        whole, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return [line.replace("\u00a0", " ") for line in lines]


def _in_one(match: re.Match[str]) -> str:
    return match[0].replace(" ", "\u00a0")


def in_column(line: str, width: int) -> str:
    """Wrap a line such as `  data      digits: ...` so that what follows its label stays below it.

    Args:
        line: Any line; one without a label in its margin stays as it is.
    """
    label = _LABEL.match(line)
    if label is None or len(line) <= width:
        return line
    lines = wrapped(line, width, " " * label.end())
    if len(lines[0]) <= label.end():  # one long word, such as a path
        return line
    return "\n".join(lines)


def fitted(text: str, width: int, *, prose: bool = True) -> str:
    """Wrap our own words to a width.

    Sentences go on indented, labelled lines in their column. What is indented without a label, such
    as a stack, stays as it is.

    Args:
        prose: Whether lines without a label are sentences of ours; otherwise these stay too.
    """
    lines = []
    for line in text.split("\n"):
        is_sentence = prose and len(line) > width and not line.startswith(" ")
        if is_sentence and not _LABEL.match(line):
            lines += wrapped(line, width, "  ")
        else:
            lines.append(in_column(line, width))
    return "\n".join(lines)


def fitting(text: str, stream: TextIO | None, *, prose: bool = True) -> str:
    """Wrap text as `fitted` to the terminal that it goes to; anywhere else each line stays one."""
    if stream is None or not stream.isatty():
        return text
    return fitted(text, shutil.get_terminal_size().columns, prose=prose)


def above_progress(text: str, stream: TextIO | None = None) -> str:
    """Make a text overwrite the terminal's current line: progress, `^C` of Ctrl-C.

    Args:
        stream: Where it is printed, by default stderr.
    """
    stream = stream or sys.stderr
    if stream is None or not stream.isatty():
        return text
    return "\r\x1b[2K" + fitting(text, stream)


def line_width(most: int) -> int:
    """Give the characters of a line of what is printed: `most`, or those of a narrower terminal."""
    return min(most, shutil.get_terminal_size().columns) if sys.stdout.isatty() else most


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


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # as Python keeps a byte that it can't decode
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
