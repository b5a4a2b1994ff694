"""Finds the run directories below a folder: trainings, and those of studies."""

import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.results.run_directory import RunDirectory

MOST_LEVELS, MOST_FOLDERS = 6, 20_000
"""How deep and how far is looked: a folder of data, given by mistake, mustn't take minutes."""


@dataclass(frozen=True, kw_only=True)
class FoundRuns:
    """The runs below a folder."""

    runs: tuple[RunDirectory, ...]
    """By path."""
    whole: bool
    """Whether everything was looked at."""


def find_runs(root: Path) -> FoundRuns:
    """Find the run directories below a folder, and the folder itself where it is one.

    Nothing is looked for inside a run. Links aren't followed, hidden folders and those that can't
    be read are left out.

    Args:
        root: The folder; nothing is found where it doesn't exist.
    """
    found, seen = [], 0
    waiting = deque([(root, 0)])
    whole = True
    while waiting:
        folder, level = waiting.popleft()
        seen += 1
        if is_run(folder):
            found.append(RunDirectory.named(folder))
        elif level == MOST_LEVELS or seen + len(waiting) > MOST_FOLDERS:
            whole = whole and not any(_folders(folder))
        else:
            waiting.extend((inner, level + 1) for inner in _folders(folder))
    return FoundRuns(runs=tuple(sorted(found, key=lambda run: run.path)), whole=whole)


def is_run(folder: Path) -> bool:
    """Tell whether a folder holds a training, one that has lost its `run.json` as well."""
    run = RunDirectory(folder)
    with suppress(OSError):  # nobody may enter it
        if run.run_json.exists():
            return True
        return run.snapshots.is_dir() and (run.logs.is_dir() or run.metrics_csv.exists())
    return False


def _folders(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if _is_folder(e) and not e.name.startswith(".")]
    except OSError:
        return
    yield from (folder / name for name in sorted(names))


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False
