"""Whether the kernel killed processes for want of memory: the counter of this process's cgroup."""

from pathlib import Path


def oom_kills(proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Count the out-of-memory kills in this process's cgroup so far (cgroup v2 or v1).

    Workers live in the same cgroup, so a count that grew while one got SIGKILL tells why.

    Returns:
        The count; 0 where there is no such counter.
    """
    try:
        lines = proc.read_text().splitlines()
    except OSError:
        return 0
    return next((count for path in _counters(lines, root) if (count := _read(path)) is not None), 0)


def _counters(lines: list[str], root: Path) -> list[Path]:
    """List where the counter may be, best first; a container may see its own cgroup as root."""
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        inner = path.lstrip("/")
        if "memory" in controllers.split(","):
            base = root / "memory"
            found += [base / inner / "memory.oom_control", base / "memory.oom_control"]
        elif not controllers:
            found += [root / inner / "memory.events", root / "memory.events"]
    return found


def _read(path: Path) -> int | None:
    try:
        words = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return None
    return next((int(value) for name, value in words if name == "oom_kill"), None)
