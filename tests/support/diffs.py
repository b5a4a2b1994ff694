"""Applies a unified diff, as `diff -u` writes it; every line of it has to fit."""

import re

_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")


def apply_diff(text: str, diff: str) -> str:
    """Return the text after a diff.

    Raises:
        ValueError: A line of context, or one to be removed, isn't there.
    """
    old, new, position = text.splitlines(keepends=True), [], 0
    for line in diff.splitlines(keepends=True)[2:]:  # after the names of both files
        if hunk := _HUNK.match(line):
            start = int(hunk[1]) - 1
            new += old[position:start]
            position = start
            continue
        if line[0] != "+":
            if old[position : position + 1] != [line[1:]]:
                raise ValueError(f"line {position + 1} isn't {line[1:]!r}")
            position += 1
        if line[0] != "-":
            new.append(line[1:])
    return "".join([*new, *old[position:]])
