"""Finds the broken images of a folder once, so that every worker leaves out the same ones.

All files are decoded in one pass, by one worker of a node while the others wait. What was found is
kept beside the images under the tree's fingerprint: it holds as long as no file changes.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from paceline.data.blocks import count_cores, run_in_order
from paceline.data.decode import BrokenImageError, decode
from paceline.data.download import locked
from paceline.data.imagetree import ImageTree, no_image
from paceline.errors import DataError
from paceline.files import open_plain, read_json_object, write_json

OnBroken = Literal["error", "skip"]
Report = Callable[[str], None]

_FOLDER = ".paceline"
_KEPT_MAX_BYTES = 1 << 30
_TASK_IMAGES = 64
_TOLD_IMAGES = 400 * _TASK_IMAGES
_SHOWN = 10
_MOST_BYTES = 1 << 30
"""More than Pillow takes from one image: about 179 million pixels."""


@dataclass(frozen=True, slots=True)
class _Task:
    root: Path
    paths: tuple[str, ...]
    size: int


def find_broken(
    tree: ImageTree,
    size: int,
    *,
    cache_dir: Path | None = None,
    jobs: int | None = None,
    report: Report = lambda text: None,
) -> Mapping[str, str]:
    """Find the images that can't be decoded; the first time by decoding all of them.

    Every worker may call this at once: one of a node (with a shared file system: one of all) looks,
    the others wait and read what it found.

    Args:
        tree: The images.
        size: Of the images that will be wanted: they are decoded in the same way now as later.
        cache_dir: Where the result is kept; the default is `.paceline` in the tree's root, or
            `~/.cache/paceline` where that can't be written.
        jobs: Processes that decode; the default is one a core.
        report: Told before the pass begins, and what it found.

    Returns:
        Path below the root -> what is wrong with it; in the order of the tree.

    Raises:
        DataError: A file can't be read, or there is no place to keep the result.
    """
    folder = _writable([cache_dir] if cache_dir else [tree.root / _FOLDER, _home()])
    kept = folder / f"broken-{size}-{tree.fingerprint()[:32]}.json"
    with locked(folder):
        if not kept.exists():
            count = sum(map(len, tree.splits.values()))
            report(f"looking for broken images among the {count:,} of {tree.root} (once)")
            write_json(kept, dict(_look(tree, size, jobs or count_cores(), report)))
        found = read_json_object(kept, _KEPT_MAX_BYTES)
    return {str(path): str(reason) for path, reason in found.items()}


def describe_broken(root: Path, broken: Sequence[tuple[str, str]]) -> str:
    """Count broken images and name the first ones, a line each."""
    lines = [f"  {root / path}: {reason}" for path, reason in broken[:_SHOWN]]
    if len(broken) > _SHOWN:
        lines.append(f"  … and {len(broken) - _SHOWN} more")
    images = "1 image is" if len(broken) == 1 else f"{len(broken)} images are"
    return "\n".join([f"{images} broken:", *lines])


def refuse_broken(root: Path, broken: Sequence[tuple[str, str]], how_to_skip: str) -> None:
    """Raise where images are broken.

    Raises:
        DataError: Names them, and says how they are left out.
    """
    if broken:
        text = describe_broken(root, broken)
        raise DataError(f"{text}\nReplace or remove them, or leave them out with {how_to_skip}")


def _look(tree: ImageTree, size: int, jobs: int, report: Report) -> Iterator[tuple[str, str]]:
    paths = [entry.path for entries in tree.splits.values() for entry in entries]
    starts = range(0, len(paths), _TASK_IMAGES)
    tasks = (_Task(tree.root, tuple(paths[at : at + _TASK_IMAGES]), size) for at in starts)
    checked = run_in_order(_check, tasks, min(jobs, max(1, len(starts))))
    for done, found in zip(starts, checked, strict=True):
        if done and done % _TOLD_IMAGES == 0:
            report(f"looked at {done:,} of {len(paths):,} images")
        yield from found


def _check(task: _Task) -> list[tuple[str, str]]:
    broken = []
    for path in task.paths:
        try:
            decode(read_file(task.root / path), task.size)
        except BrokenImageError as error:
            broken.append((path, str(error)))
    return broken


def read_file(path: Path) -> bytes:
    """Read an image file.

    Raises:
        DataError: It can't be read, or is no regular file (which doesn't make it a broken image).
        BrokenImageError: It is larger than an image can be.
    """
    try:
        with open_plain(path) as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(size) if size <= _MOST_BYTES else b""
    except OSError as error:
        raise DataError(f"{path}: the file can't be read: {error.strerror}") from error
    except ValueError as error:
        raise no_image(path, error) from error
    if size > _MOST_BYTES:
        raise BrokenImageError(f"its {size:,} bytes are too many for an image")
    return content


def _writable(folders: Sequence[Path]) -> Path:
    for folder in folders:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder):
                return folder
        except OSError as error:
            reason = f"{folder} can't be written: {error.strerror}"
    raise DataError(f"what is known of broken images can't be kept: {reason}")


def _home() -> Path:
    return Path.home() / ".cache" / "paceline"
