"""Whether the kernel killed a process for want of memory: by its log, or its cgroup's counter."""

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from paceline.launch.process_tree import in_first_namespace

# A record of /dev/kmsg is "priority,sequence,microseconds,flags;text" (the kernel's
# Documentation/ABI/testing/dev-kmsg); each read gives one.
_KILLED = re.compile(rb"^\d+,\d+,(\d+),[^;]*;.*\b[Oo]ut of memory: Kill(?:ed)? process (\d+)\b")
_RECORD_BYTES = 8192


def oom_killed(since_s: float, log: Path = Path("/dev/kmsg")) -> frozenset[int] | None:
    """List the processes that the kernel's log says were killed for want of memory.

    Args:
        since_s: From when on, by `time.monotonic`, whose clock the log has.
        log: Of the kernel.

    Returns:
        Process ids; None where the log can't be read, or has other ids than this process sees.
    """
    try:
        # The log names processes by their ids in the first namespace.
        if not in_first_namespace("pid"):
            return None
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    pids = set()
    try:
        while record := _next_record(descriptor):
            for line in record.splitlines():
                killed = _KILLED.match(line)
                # The kernel's clock and this one may differ a little: a second of tolerance.
                if killed and int(killed[1]) >= (since_s - 1) * 1e6:
                    pids.add(int(killed[2]))
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return frozenset(pids)


def _next_record(descriptor: int) -> bytes:
    while True:
        # EPIPE: the oldest records have gone meanwhile; the next ones follow.
        with suppress(BrokenPipeError):
            try:
                return os.read(descriptor, _RECORD_BYTES)
            except BlockingIOError:
                return b""


def oom_kills(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Count the out-of-memory kills in this process's cgroup so far (cgroup v2 or v1).

    Workers live in the same cgroup, so a count that grew while one got SIGKILL tells why.

    Returns:
        The count; 0 where there is no such counter.
    """
    groups = control_groups(("memory",), proc, root)
    files = [group / name for group in groups for name in ("memory.events", "memory.oom_control")]
    return next((count for path in files if (count := _read(path)) is not None), 0)


def control_groups(controllers: Collection[str], proc: Path, root: Path) -> list[Path]:
    """List this process's control groups, each before those that it is in.

    A container may see its own group as the root.

    Args:
        controllers: Whose groups of version 1; one of version 2 has all controllers.
        proc: Names the control groups of this process.
        root: Where control groups are mounted.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return []
    groups = []
    for line in lines:
        _, named, path = line.split(":", 2)
        for name in named.split(","):
            if not name or name in controllers:
                base = root / (named if (root / named).is_dir() else name)
                inner = Path(path.lstrip("/"))
                groups += [base / part for part in (inner, *inner.parents)]
    return groups


def _read(path: Path) -> int | None:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    return next((int(value) for name, value in words if name == "oom_kill"), None)
