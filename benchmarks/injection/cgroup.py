"""A cgroup that limits the memory of a command and all that it starts."""

import os
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@final
@dataclass(frozen=True)
class Cgroup:
    """A cgroup for memory, of version 1 or 2."""

    path: Path

    @staticmethod
    def make(name: str) -> "Cgroup":
        """Make one; one of the same name that a killed driver left is used."""
        if _V1.is_dir():
            made = _V1 / name
        else:
            made = _V2 / name
            (_V2 / "cgroup.subtree_control").write_text("+memory")
        made.mkdir(exist_ok=True)
        return Cgroup(made)

    def limit(self, num_bytes: int) -> None:
        """Set how much memory its processes may use together."""
        name = "memory.limit_in_bytes" if self.path.parent == _V1 else "memory.max"
        (self.path / name).write_text(str(num_bytes))

    def wrap(self) -> list[str]:
        """Give the words before a command that is to run in it."""
        return ["sh", "-c", f'echo $$ > {self.path}/cgroup.procs; exec "$@"', "sh"]

    def remove(self) -> None:
        """Remove it; its processes have ended."""
        self.path.rmdir()


@cache
def no_cgroup() -> str:
    """Say why no cgroup can be made here."""
    try:
        made = Cgroup.make(f"paceline-soak-try-{os.getpid()}")
        try:
            made.limit(1 << 30)
        finally:
            made.remove()
    except OSError as error:
        return f"a cgroup with a memory limit ({error.strerror})"
    return ""
