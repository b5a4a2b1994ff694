"""The git commit of a training's code."""

import subprocess
from pathlib import Path

_LIMIT_S = 0.3
"""A start waits no longer: of a huge work tree, or on a slow file system, nothing is known then."""


def find_revision(
    reference: str, git: str = "git", limit_s: float = _LIMIT_S
) -> dict[str, object] | None:
    """Ask git about the directory of a script or recipe file, else about the working directory.

    Args:
        reference: A path, a path and a function (`file.py:build`), or a module's.

    Returns:
        `commit`, its hash in full, and `dirty`, whether files that git knows differ from it. None
        without git, a repository or a commit, and where it takes too long.
    """
    path = Path(reference.rpartition(":")[0] or reference)
    where = path.parent if path.suffix == ".py" else Path()
    # One process says both. It takes no lock, and runs no monitor that the repository names.
    options = ("--no-optional-locks", "-c", "core.fsmonitor=false")
    command = (git, *options, "status", "--porcelain=v2", "--branch", "-uno")
    try:
        done = subprocess.run(
            command,
            cwd=where,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    heads = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    if not heads or heads == ["(initial)"]:
        return None
    return {"commit": heads[0], "dirty": any(not line.startswith("#") for line in lines)}
