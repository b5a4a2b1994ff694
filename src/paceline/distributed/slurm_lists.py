"""Slurm's short forms: `node[01-03,7]` for hosts, `2(x3),1` for tasks per node."""

import re
from collections.abc import Iterator

from paceline.errors import UsageError

_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hosts_of(text: str) -> Iterator[str]:
    """Name the hosts of a compressed list, in its order.

    Args:
        text: For example `gpu-a,rack[1-2]n[08-10,12]`.

    Raises:
        UsageError: It isn't such a list.
    """
    if not text or ",".join(_PART.findall(text)) != text:
        raise UsageError(f"not a list of hosts as Slurm writes it: {text!r}")
    for part in _PART.findall(text):
        yield from _expanded(part)


def tasks_of_nodes(text: str) -> list[int]:
    """Give the number of tasks of each node.

    Args:
        text: For example `4,2` or `2(x3),1`.

    Raises:
        UsageError: It isn't such a list.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = _REPEATED.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"not tasks per node as Slurm writes them: {text!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expanded(part: str) -> Iterator[str]:
    bracket = _BRACKET.search(part)
    if bracket is None:
        yield part
        return
    before, after = part[: bracket.start()], part[bracket.end() :]
    for number in _numbers(bracket[1], part):
        yield from _expanded(f"{before}{number}{after}")


def _numbers(ranges: str, part: str) -> Iterator[str]:
    """Count through `08-10,12`, keeping leading zeros."""
    for text in ranges.split(","):
        match = _RANGE.fullmatch(text)
        if match is None:
            raise UsageError(f"not a list of hosts as Slurm writes it: {part!r}")
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            yield f"{number:0{len(first)}d}"
