"""Lists the files of an image folder, DIR/{train,val,test}/CLASS/…, in torchvision's order."""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import DataError
from paceline.files import refuse_special

SPLITS: Sequence[str] = ("train", "val", "test")
SUFFIXES: Sequence[str] = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
"""What counts as an image file, in lower or upper case."""


@dataclass(frozen=True, slots=True)
class ImageEntry:
    """One image file."""

    path: str
    """Below the tree's root, with `/`."""
    label: int
    """Position of its class among the tree's class names."""
    size_bytes: int
    mtime_ns: int


@dataclass(frozen=True, kw_only=True)
class ImageTree:
    """All the image files of a folder."""

    root: Path
    class_names: tuple[str, ...]
    """Sorted; those of the training images hold for every split."""
    splits: Mapping[str, tuple[ImageEntry, ...]]

    def fingerprint(self) -> str:
        """Hash names, sizes and times of change: another one where any file was changed."""
        digest = hashlib.sha256(repr(self.class_names).encode())
        for split, entries in self.splits.items():
            digest.update(f"{split}\0{len(entries)}\0".encode())
            for entry in entries:
                text = f"{entry.path}\0{entry.label}\0{entry.size_bytes}\0{entry.mtime_ns}\0"
                digest.update(text.encode(errors="surrogateescape"))
        return digest.hexdigest()


def scan_tree(root: Path) -> ImageTree:
    """List an image folder. Classes and files are sorted by name, as torchvision sorts them.

    Args:
        root: Holds `train`, and usually `val` and `test`; each holds one folder a class.

    Raises:
        DataError: There are no training images, a class has none, or another split has a class
            that the training images don't have.
    """
    try:
        present = [name for name in SPLITS if (root / name).is_dir()]
        if "train" not in present:
            raise DataError(
                f"{root}: holds no folder `train` ({_found(root)}). Expected are "
                "train/CLASS/IMAGE files, and the same in val and, if there is one, test"
            )
        names = _class_names(root / "train")
        splits = {name: tuple(_list_split(root, name, names)) for name in present}
    except OSError as error:
        raise DataError(f"{root}: can't be listed: {error.filename}: {error.strerror}") from error
    _check_classes(root, names, splits["train"])
    return ImageTree(root=root, class_names=names, splits=splits)


def _class_names(folder: Path) -> tuple[str, ...]:
    with os.scandir(folder) as entries:
        return tuple(sorted(e.name for e in entries if e.is_dir() and not e.name.startswith(".")))


def _list_split(root: Path, split: str, names: Sequence[str]) -> Iterator[ImageEntry]:
    unknown = set(_class_names(root / split)) - set(names)
    if unknown:
        raise DataError(
            f"{root / split}: the class {min(unknown)!r} has no training images in "
            f"{root / 'train'}; classes there: {', '.join(names[:20])}"
        )
    for label, name in enumerate(names):
        top = root / split / name
        for folder, files in sorted(_walk(top)) if top.is_dir() else []:
            for file in sorted(files):
                if file.lower().endswith(tuple(SUFFIXES)):
                    path = Path(folder, file)
                    status = path.stat()
                    try:
                        refuse_special(status)
                    except ValueError as error:
                        raise no_image(path, error) from error
                    relative = path.relative_to(root).as_posix()
                    yield ImageEntry(relative, label, status.st_size, status.st_mtime_ns)


def no_image(path: Path, error: ValueError) -> DataError:
    """Say what to do about a file with an image's name that isn't a plain file."""
    return DataError(f"{path}: {error}, and so no image. Remove it")


def _walk(top: Path) -> Iterator[tuple[str, list[str]]]:
    """List a folder and those below it, as `os.walk` does that follows links: path and files.

    Raises:
        DataError: A link leads back to a folder that it lies in.
    """
    left: list[tuple[str, Mapping[tuple[int, int], str]]] = [(str(top), {})]
    while left:
        folder, above = left.pop()
        status = os.stat(folder)  # noqa: PTH116  # a text, for which a Path would be made anew
        key = status.st_dev, status.st_ino
        if key in above:
            raise DataError(
                f"{folder}: leads back to {above[key]}, the folder that it lies in, so that its "
                "images would count again and again. Remove that link"
            )
        with os.scandir(folder) as entries:
            listed = [(entry.is_dir(), entry.name) for entry in entries]
        yield folder, [name for is_folder, name in listed if not is_folder]
        within = {**above, key: folder}
        left += [(f"{folder}/{name}", within) for is_folder, name in listed if is_folder]


def _check_classes(root: Path, names: Sequence[str], train: Sequence[ImageEntry]) -> None:
    filled = {entry.label for entry in train}
    empty = [name for label, name in enumerate(names) if label not in filled]
    if empty or not names:
        which = f"the class {empty[0]!r} ({len(empty)} such)" if empty else "the folder"
        raise DataError(
            f"{root / 'train'}: {which} holds no image ({', '.join(SUFFIXES)}). Remove it, or "
            "put its images there"
        )


def _found(root: Path) -> str:
    if not root.is_dir():
        return "there is no such directory"
    listed = sorted(path.name for path in root.iterdir())
    return "found: " + (", ".join(listed[:10]) or "nothing")
