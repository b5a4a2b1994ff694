"""Image folders, DIR/{train,val,test}/CLASS/…, as map-style data sets of raw images.

Listed in torchvision's order. Broken images are found in one pass, by one worker of a node while
the others wait, so that every worker leaves out the same ones; what was found is kept beside the
images under the tree's fingerprint: it holds as long as no file changes.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from paceline.data.decode import BrokenImageError, decode, decoded_to
from paceline.data.download import locked
from paceline.data.loading.dataset_worker import run_in_order
from paceline.errors import DataError
from paceline.files import open_plain, read_json_object, refuse_special, write_json
from paceline.launch.worker_count import usable_cores

SPLITS: Sequence[str] = ("train", "val", "test")
SUFFIXES: Sequence[str] = ".jpg .jpeg .png .webp .bmp .tif .tiff .ppm .pgm".split()
"""What counts as an image file, in lower or upper case: the same as for torchvision's folders."""


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
                f"{root}: holds no folder `train` ({_describe_found(root)}). Expected are "
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
    # Labels are positions among the training classes: another class would have none.
    unknown = set(_class_names(root / split)) - set(names)
    if unknown:
        raise DataError(
            f"{root / split}: the class {min(unknown)!r} has no training images in "
            f"{root / 'train'}; classes there: {', '.join(names[:20])}"
        )
    # Sorted folders and files: the order is the same on every host and file system.
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

    Files and folders whose names begin with a dot are left out.

    Raises:
        DataError: A link leads back to a folder that it lies in.
    """
    left: list[tuple[str, Mapping[tuple[int, int], str]]] = [(str(top), {})]
    while left:
        folder, above = left.pop()
        status = os.stat(folder)  # noqa: PTH116  # a text, for which a Path would be made anew
        # A folder is known by device and inode; meeting one of its own ancestors means a loop of
        # links.
        key = status.st_dev, status.st_ino
        if key in above:
            raise DataError(
                f"{folder}: leads back to {above[key]}, the folder that it lies in, so that its "
                "images would count again and again. Remove that link"
            )
        with os.scandir(folder) as entries:
            listed = [(entry.is_dir(), entry.name) for entry in entries]
        # Programs leave names that begin with a dot beside images, such as macOS `._photo.jpg`.
        listed = [each for each in listed if not each[1].startswith(".")]
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


def _describe_found(root: Path) -> str:
    if not root.is_dir():
        return "there is no such directory"
    listed = sorted(path.name for path in root.iterdir())
    return "found: " + (", ".join(listed[:10]) or "nothing")


OnBroken = Literal["error", "skip"]
Report = Callable[[str], None]

_FOLDER = ".paceline"
_KEPT_MAX_BYTES = 1 << 30
_TASK_IMAGES = 64
_REPORT_IMAGES = 400 * _TASK_IMAGES
_SHOWN = 10
_MAX_BYTES = 1 << 30
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
            write_json(kept, dict(_check_images(tree, size, jobs or usable_cores(), report)))
        reasons = read_json_object(kept, _KEPT_MAX_BYTES)
    return {str(path): str(reason) for path, reason in reasons.items()}


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


def _check_images(
    tree: ImageTree, size: int, jobs: int, report: Report
) -> Iterator[tuple[str, str]]:
    paths = [entry.path for entries in tree.splits.values() for entry in entries]
    starts = range(0, len(paths), _TASK_IMAGES)
    tasks = (_Task(tree.root, tuple(paths[at : at + _TASK_IMAGES]), size) for at in starts)
    checked = run_in_order(_check, tasks, min(jobs, max(1, len(starts))))
    for done, broken in zip(starts, checked, strict=True):
        if done and done % _REPORT_IMAGES == 0:
            report(f"looked at {done:,} of {len(paths):,} images")
        yield from broken


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
            content = file.read(size) if size <= _MAX_BYTES else b""
    except OSError as error:
        raise DataError(f"{path}: the file can't be read: {error.strerror}") from error
    except ValueError as error:
        raise no_image(path, error) from error
    if size > _MAX_BYTES:
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


IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class ImageFolder:
    """One split of an image folder; an item is (uint8 (3, size, size), class number)."""

    scale = 255.0
    """The raw value that stands for 1."""
    mean = IMAGENET_MEAN
    std = IMAGENET_STD

    def __init__(
        self,
        name: str,
        root: Path,
        entries: Sequence[ImageEntry],
        names: tuple[str, ...],
        size: int,
    ) -> None:
        """Create the image folder.

        Args:
            name: For messages.
            root: Of the tree.
            entries: The images, in their order.
            names: Of the classes.
            size: Height and width of the items, in pixels.
        """
        self.name = name
        self.class_names = names
        self.size = size
        self._root = root
        self._entries = entries

    def __len__(self) -> int:
        """Count the images."""
        return len(self._entries)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Read one image.

        Raises:
            DataError: The file can't be read or is broken (it has changed since it was checked).
        """
        entry = self._entries[index]
        path = self._root / entry.path
        try:
            return decoded_to(read_file(path), self.size), entry.label
        except BrokenImageError as error:
            raise DataError(f"{path}: the image is broken: {error}") from error

    def fingerprint(self) -> str:
        """Hash the images' names, classes and sizes; not their times, which copies don't keep."""
        digest = hashlib.sha256(f"{self.size} {self.class_names}".encode())
        for entry in self._entries:
            text = f"{entry.path}\0{entry.label}\0{entry.size_bytes}\0"
            digest.update(text.encode(errors="surrogateescape"))
        return digest.hexdigest()

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def labels(self) -> list[int]:
        """Class numbers of all the images."""
        return [entry.label for entry in self._entries]


def load_image_folder(
    root: Path,
    size: int = 224,
    on_broken: OnBroken = "error",
    *,
    jobs: int | None = None,
    report: Report = lambda text: None,
) -> Mapping[str, ImageFolder]:
    """List an image folder and find its broken images; nothing but these is left out.

    Every worker may call this at once, and gets the same. The first time all the images are
    decoded once, by one worker of a node.

    Args:
        root: Holds `train`, and usually `val` and `test`; each holds one folder a class.
        size: Height and width of the images that are given.
        on_broken: `error` refuses a folder with broken images; `skip` leaves them out.
        jobs: Processes that look for broken images; the default is one a core.
        report: Told how many are left out, and which.

    Returns:
        The splits that are there, by name.

    Raises:
        DataError: The folder isn't as expected, or has broken images.
    """
    tree = scan_tree(root)
    broken = find_broken(tree, size, jobs=jobs, report=report)
    if on_broken == "error":
        refuse_broken(root, list(broken.items()), "--on-broken skip (on_broken='skip')")
    elif broken:
        report(f"{describe_broken(root, list(broken.items()))}\nThey are left out")
    return {split: _one_split(tree, split, broken, size) for split in tree.splits}


def _one_split(tree: ImageTree, split: str, broken: Mapping[str, str], size: int) -> ImageFolder:
    good = [entry for entry in tree.splits[split] if entry.path not in broken]
    if not good:
        raise DataError(f"{tree.root / split}: holds no image that could be used")
    return ImageFolder(f"{tree.root.name}/{split}", tree.root, good, tree.class_names, size)
