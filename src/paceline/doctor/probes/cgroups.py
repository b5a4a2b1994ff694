"""What a control group allows its processes: cores and memory, in cgroup v1 and v2."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60
"""cgroup v1 writes a number near 2^63 where there is no limit."""


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """The narrowest limits of a control group and those that it is in; None: no limit."""

    cores: float | None
    memory_bytes: int | None


def allowance(
    proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Allowance:
    """Read this process's limits.

    Args:
        proc: Names the control groups of this process.
        root: Where control groups are mounted.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return Allowance(cores=None, memory_bytes=None)
    groups = list(_groups(lines, root))
    cores = [found for group in groups if (found := _cores(group)) is not None]
    memory = [found for group in groups if (found := _memory(group)) is not None]
    return Allowance(
        cores=min(cores, default=None),
        memory_bytes=min(memory, default=None),
    )


def _groups(lines: list[str], root: Path) -> Iterator[Path]:
    """List the groups and those that they are in; a container may see its own group as the root."""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",") if controllers else [""]
        for name in names:
            if name in ("", "cpu", "memory"):
                base = root / (controllers if (root / controllers).is_dir() else name)
                inner = Path(path.lstrip("/"))
                yield from (base / part for part in (inner, *inner.parents))


def _cores(group: Path) -> float | None:
    words = _words(group / "cpu.max")
    if not words:
        quota, period = _words(group / "cpu.cfs_quota_us"), _words(group / "cpu.cfs_period_us")
        words = quota + period
    if len(words) != 2 or not words[0].isdecimal() or not int(words[1]):
        return None  # `max` in v2, -1 in v1
    return int(words[0]) / int(words[1])


def _memory(group: Path) -> int | None:
    words = _words(group / "memory.max") or _words(group / "memory.limit_in_bytes")
    if not words or not words[0].isdecimal() or int(words[0]) >= _UNLIMITED:
        return None
    return int(words[0])


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
