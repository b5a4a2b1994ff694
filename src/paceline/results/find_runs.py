"""Finds the run directories below a folder, trainings and those of studies, and one by its name."""

import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError
from paceline.options.fields import closest_names
from paceline.options.figures import listed as in_words
from paceline.results.json_object import read_object, section, text
from paceline.results.run_directory import USUAL_FOLDER, RunDirectory
from paceline.results.study import STUDY_JSON

MAX_LEVELS, MAX_FOLDERS = 6, 20_000
"""How deep and how far is looked: a folder of data, given by mistake, mustn't take minutes."""

_STARTED = re.compile(r"-\d{8}-\d{6}(-\d+)?$")
"""What a directory has behind its run's name, where the user named none."""
RUN_OR_NAME = "RUN_DIR is a run directory, or the name of a run below runs/."
"""What commands say in their help whose RUN_DIR is found by `choose_run`."""


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
    runs, seen = [], 0
    waiting = deque([(root, 0)])
    whole = True
    while waiting:
        folder, level = waiting.popleft()
        seen += 1
        if is_run(folder):
            runs.append(RunDirectory.named(folder))
        elif level == MAX_LEVELS or seen + len(waiting) > MAX_FOLDERS:
            whole = whole and not any(_folders(folder))
        else:
            waiting.extend((inner, level + 1) for inner in _folders(folder))
    return FoundRuns(runs=tuple(sorted(runs, key=lambda run: run.path)), whole=whole)


def choose_run(given: str) -> RunDirectory:
    """Find the run that a user names: by its directory, or as `paceline runs` lists it.

    A directory counts before a name; what it holds isn't looked at.

    Args:
        given: A path, or the name of a run below runs/, or of its directory.

    Raises:
        UsageError: There is no such directory, and no run is called so, or several are.
    """
    run, usual = RunDirectory.named(given), USUAL_FOLDER.absolute()
    if run.path.is_file():
        raise UsageError(f"{given} is a file: name the directory of a run, or the run")
    if not _is_missing(run.path):
        return run
    # Not a directory: a name, as it is listed below runs/.
    names = {each: _names(each, usual) for each in find_runs(usual).runs}
    same = [each for each in names if given in names[each]]
    if len(same) > 1:
        paths = ", ".join(str(each.path) for each in same)
        raise UsageError(f"{len(same)} runs are called {given!r}: {paths}. Name the directory")
    if same:
        return same[0]
    # Nothing is called so: suggest names that are nearly the same.
    known = {name for called in names.values() for name in called}
    close = closest_names(given.removeprefix(f"{USUAL_FOLDER}/").rstrip("/"), known)
    meant = f" Did you mean {in_words([repr(name) for name in close], 'or')}?" if close else ""
    raise UsageError(
        f"there is no run directory {given}, and no run below {usual} is called so.{meant} "
        "`paceline runs` lists them"
    )


def _is_missing(path: Path) -> bool:
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:  # it can't be looked at: whoever reads it says why
        return False
    return False


def _names(run: RunDirectory, usual: Path) -> set[str]:
    """Give what a run below the usual folder is called: its place there, directory and name."""
    label = str(run.path.relative_to(usual)) if run.path != usual else run.path.name
    content = read_object(run.run_json, [])
    name = text(section(content, "settings"), "name")
    if not content:  # it has just begun: its directory says the name that it will have
        name = name or _STARTED.sub("", run.path.name)
    return {label, run.path.name} | ({name} if name else set())


def is_run(folder: Path) -> bool:
    """Tell whether a folder holds a training, one that has lost its `run.json` as well.

    A `run.json` of something else is none.
    """
    run = RunDirectory(folder)
    with suppress(OSError):  # nobody may enter it
        if run.snapshots.is_dir() and (run.logs.is_dir() or run.metrics_csv.exists()):
            return True
        return run.is_described()
    return False


def is_of_study(run: Path) -> bool:
    """Return whether `paceline scale` has made a run."""
    return (run.parent.parent / STUDY_JSON).exists()


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
