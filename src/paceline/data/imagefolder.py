"""Image folders, DIR/{train,val,test}/CLASS/…, as map-style data sets of raw images."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from paceline.data.decode import BrokenImageError, decoded_to
from paceline.data.imagecheck import (
    OnBroken,
    Report,
    describe_broken,
    find_broken,
    read_file,
    refuse_broken,
)
from paceline.data.imagetree import ImageEntry, ImageTree, scan_tree
from paceline.errors import DataError

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
        """Args:
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
