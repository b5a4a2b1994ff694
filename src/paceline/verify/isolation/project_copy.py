"""The copy of the user's project that a verified training runs in."""

import json
import os
import shutil
import subprocess
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

_MOST_BYTES, _MOST_FILES = 100_000_000, 10_000
"""Copied for each launch, in about a second at most."""


@final
@dataclass(frozen=True)
class ProjectCopy:
    """A project and its copy, both without symbolic links in their paths."""

    project: str
    copy: str

    @classmethod
    def around(cls, directory: Path, copy: Path) -> "ProjectCopy":
        """Return the copy of the repository that a directory is in, or of the directory itself."""
        here, home = directory.resolve(), Path.home().resolve()
        tops = (d for d in (here, *here.parents) if d != home and (d / ".git").exists())
        return cls(str(next(tops, here)).rstrip("/"), str(copy.resolve()))

    def path_in_copy(self, path: str) -> str:
        """Return where a file of the project is in the copy, and any other path as it is."""
        directory, name = os.path.split(path)
        real = os.path.join(os.path.realpath(directory), name)
        is_inside = os.path.isabs(path) and f"{real}/".startswith(f"{self.project}/")
        return self.copy + real[len(self.project) :] if is_inside else path

    def original(self, text: str) -> str:
        """Return a text that names the user's own files instead of the copies."""
        return text.replace(self.copy, self.project)

    def name_originals(self, file: Path) -> None:
        """Have a file that a worker wrote, text or JSON, name the user's files."""
        names = [self.copy, self.project]
        if file.suffix == ".jsonl":
            names = [json.dumps(name)[1:-1] for name in names]
        copy, project = map(os.fsencode, names)
        file.write_bytes(file.read_bytes().replace(copy, project))

    def make(self) -> None:
        """Copy files, the smallest first, up to 100 MB and 10,000 files; link everything else."""
        # Choose: what git tracks or would track, then other files, nearest directories first.
        listed = self._listed()
        directories, others = self._walk(set(listed))
        copied = set(self._smallest(listed, others))
        directories.update(str(parent) for path in copied for parent in Path(path).parents[:-1])
        # Copy. A directory that wasn't walked, with nothing to copy in it, is linked as a whole.
        for directory in directories:
            os.makedirs(f"{self.copy}/{directory}", exist_ok=True)
        for directory in directories:
            for entry in _entries(f"{self.project}/{directory}"):
                path = os.path.join(directory, entry.name)
                if path not in directories:
                    self._put(path, entry, is_copied=path in copied)

    def written(self) -> Iterator[str]:
        """Return the user's files that are new or different in the copy."""
        for directory, _, names in os.walk(self.copy):
            for path in (os.path.join(directory, name) for name in sorted(names)):
                original = self.original(path)
                if not os.path.islink(path) and _state(path) != _state(original):
                    yield original

    def _listed(self) -> list[str]:
        words = ("git", "-C", f"{self.project}/", "ls-files", "-coz", "--exclude-standard")
        try:
            done = subprocess.run(words, capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError):
            return []
        paths = os.fsdecode(done.stdout).split("\0")[:-1]
        siblings = Counter(map(os.path.dirname, paths))
        paths = [path for path in paths if siblings[os.path.dirname(path)] <= _MOST_FILES]
        return [p for p in paths if not f"{self.project}/{p}".startswith(f"{sys.prefix}/")]

    def _walk(self, listed: set[str]) -> tuple[set[str], list[str]]:
        """Return directories with few files, and the files in them that aren't listed."""
        directories, others, waiting = {""}, list[str](), deque([""])
        while waiting and len(others) < _MOST_FILES:
            directory = waiting.popleft()
            entries = _entries(f"{self.project}/{directory}")
            if len(entries) > _MOST_FILES:
                continue
            directories.add(directory)
            for entry in entries:
                path = os.path.join(directory, entry.name)
                if entry.is_dir(follow_symlinks=False):
                    is_ours = self.copy.startswith(f"{entry.path}/")
                    waiting += [path] * (_belongs_to_project(entry) and not is_ours)
                elif path not in listed:
                    others.append(path)
        return directories, others

    def _smallest(self, *groups: Iterable[str]) -> Iterator[str]:
        bytes_left, files_left = _MOST_BYTES, _MOST_FILES
        for group in groups:
            states = ((_state(f"{self.project}/{path}"), path) for path in group)
            known = ((_is_data(path), state, path) for state, path in states if state)
            for _, (size, _), path in sorted(known):
                if size <= bytes_left and files_left:
                    bytes_left, files_left = bytes_left - size, files_left - 1
                    yield path

    def _put(self, path: str, entry: os.DirEntry[str], *, is_copied: bool) -> None:
        copy, target = f"{self.copy}/{path}", entry.path
        if entry.is_symlink():  # leads where the user's does, within the copy as well
            target = os.path.join(os.path.dirname(target), os.readlink(target))
            target = self.path_in_copy(os.path.normpath(target))
        elif is_copied and entry.is_file():
            with suppress(OSError):  # it can't be read
                shutil.copy2(target, copy)
                return
            Path(copy).unlink(missing_ok=True)
        os.symlink(target, copy)


def _is_data(path: str) -> bool:
    return not path.endswith((".py", ".toml", ".yaml", ".yml", ".json", ".cfg"))


def _entries(directory: str) -> list[os.DirEntry[str]]:
    with suppress(OSError), os.scandir(directory) as entries:
        return sorted(entries, key=lambda entry: entry.name)
    return []


def _belongs_to_project(entry: os.DirEntry[str]) -> bool:
    """Return whether a directory isn't git's own, Python's environment or mounted."""
    is_environment = entry.path == sys.prefix or any(
        os.path.exists(f"{entry.path}/{name}") for name in ("pyvenv.cfg", "conda-meta")
    )
    return not (entry.name == ".git" or is_environment or os.path.ismount(entry.path))


def _state(path: str) -> tuple[int, int] | None:
    with suppress(OSError):
        status = os.lstat(path)
        return status.st_size, status.st_mtime_ns
    return None


def denial(path: str, *, is_linked: bool = False) -> str:
    """Return why a file can't be written, and what to do.

    Args:
        is_linked: Whether it was to be written through a link in the copy.
    """
    directory = next(parent for parent in Path(path).parents if parent.is_dir())
    if is_linked:
        why, advice = "is only linked in verify's copy of the project", "move the file away"
    else:
        why = "verify does not allow"
        advice = "write to a relative path, which is in verify's copy of the project"
    return f"the script writes {path}, which {why}: give --writable {directory}, or {advice}"
