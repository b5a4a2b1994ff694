"""Reads packed image folders: a directory of raw uint8 images, mapped into memory, and an index.

`index.json` holds sizes, class names and the SHA-256 of every block; for each split there are
`SPLIT.images` (N x 3 x size x size bytes), `SPLIT.labels` (N little-endian int64) and
`SPLIT.files.json` (the N files that they were made of).
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.data.imagefolder import IMAGENET_MEAN, IMAGENET_STD
from paceline.data.memory import TensorData
from paceline.errors import DataError
from paceline.files import read_json_object, write_json

FORMAT = 1
"""Changes whenever older readers couldn't read what is written."""
_INDEX_MAX_BYTES = 1 << 30
INDEX = "index.json"
_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, kw_only=True)
class PackedBlock:
    """A run of images, checked together."""

    num_images: int
    sha256: str
    broken: tuple[tuple[str, str], ...] = ()
    """Images that were left out here: path and reason."""


@dataclass(frozen=True, kw_only=True)
class PackedSplit:
    """One split of a packed folder."""

    num_images: int
    labels_sha256: str
    blocks: tuple[PackedBlock, ...]


@dataclass(frozen=True, kw_only=True)
class PackIndex:
    """What `index.json` holds."""

    size: int
    source: str
    """Fingerprint of the image folder."""
    class_names: tuple[str, ...]
    splits: Mapping[str, PackedSplit]

    @property
    def image_bytes(self) -> int:
        """Size of one image."""
        return 3 * self.size * self.size


def images_file(split: str) -> str:
    """Name the file of a split's images."""
    return f"{split}.images"


def labels_file(split: str) -> str:
    """Name the file of a split's labels."""
    return f"{split}.labels"


def write_index(directory: Path, index: PackIndex) -> None:
    """Write `index.json`, whole or not at all."""
    write_json(directory / INDEX, {"format": FORMAT, **asdict(index)})


def read_index(directory: Path) -> PackIndex:
    """Read `index.json`, and check that the files have the sizes that it states.

    Raises:
        DataError: The directory holds no packed folder, or one that is damaged or too new.
    """
    path = directory / INDEX
    try:
        content: Any = read_json_object(path, _INDEX_MAX_BYTES)
        if content["format"] != FORMAT:
            raise DataError(
                f"{path}: written in the format {content['format']}, but this Paceline reads "
                f"{FORMAT}: pack the folder again"
            )
        index = _index_of(content)
    except FileNotFoundError as error:
        raise DataError(
            f"{directory} holds no packed images: there is no {INDEX}. Make it with "
            f"`paceline pack FOLDER {directory}`"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} can't be read: {error!r}. {_again(directory)}") from error
    for split, packed in index.splits.items():
        _check_size(directory / images_file(split), packed.num_images * index.image_bytes)
        _check_size(directory / labels_file(split), packed.num_images * 8)
    return index


def load_packed(directory: Path, verify: bool = False) -> Mapping[str, TensorData]:
    """Open a packed image folder; its images stay on disk and are mapped into memory.

    The same images as `load_image_folder` with the same size gives, in the same order. Workers of a
    node share the memory.

    Args:
        directory: What `paceline pack` wrote.
        verify: Read everything once and compare its checksums.

    Returns:
        The splits that are there, by name; their images are kept on the host.

    Raises:
        DataError: There is no packed folder, or it is damaged.
    """
    index = read_index(directory)
    if verify:
        verify_packed(directory)
    return {split: _open_split(directory, index, split) for split in index.splits}


def verify_packed(directory: Path) -> None:
    """Read a packed folder whole and compare its checksums.

    Raises:
        DataError: Something differs; names the file and the images.
    """
    index = read_index(directory)
    for split, packed in index.splits.items():
        labels = directory / labels_file(split)
        if hashlib.sha256(labels.read_bytes()).hexdigest() != packed.labels_sha256:
            raise DataError(f"{labels} is damaged (its SHA-256 differs). {_again(directory)}")
        _verify_images(directory / images_file(split), index, packed)


def _verify_images(path: Path, index: PackIndex, packed: PackedSplit) -> None:
    first = 0
    with path.open("rb") as file:
        for block in packed.blocks:
            digest = hashlib.sha256()
            left = block.num_images * index.image_bytes
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                digest.update(chunk)
                left -= len(chunk) or left
            if digest.hexdigest() != block.sha256:
                raise DataError(
                    f"{path} is damaged: the SHA-256 of the images {first} to "
                    f"{first + block.num_images - 1} differs. {_again(path.parent)}"
                )
            first += block.num_images


def _open_split(directory: Path, index: PackIndex, split: str) -> TensorData:
    count = index.splits[split].num_images
    shape = (count, 3, index.size, index.size)
    # Private: nothing that is done to the tensor reaches the file.
    flat = torch.from_file(
        str(directory / images_file(split)),
        shared=False,
        size=count * index.image_bytes,
        dtype=torch.uint8,
    )
    labels = np.fromfile(directory / labels_file(split), dtype="<i8")
    return TensorData(
        name=f"{directory.name}/{split}",
        images=flat.view(shape),
        labels=torch.from_numpy(labels.astype(np.int64)),
        class_names=index.class_names,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        keep_on_host=True,
    )


def _index_of(content: Mapping[str, object]) -> PackIndex:
    splits, names = content["splits"], content["class_names"]
    if not isinstance(splits, dict) or not isinstance(names, list):
        raise ValueError("splits or class_names are not what they should be")
    return PackIndex(
        size=int(str(content["size"])),
        source=str(content["source"]),
        class_names=tuple(map(str, names)),
        splits={name: _split_of(split) for name, split in splits.items()},
    )


def _split_of(content: Mapping[str, object]) -> PackedSplit:
    blocks = content["blocks"]
    if not isinstance(blocks, list):
        raise ValueError("blocks is no list")
    return PackedSplit(
        num_images=int(str(content["num_images"])),
        labels_sha256=str(content["labels_sha256"]),
        blocks=tuple(map(block_of, blocks)),
    )


def block_of(content: Mapping[str, object]) -> PackedBlock:
    """Read a block's entry."""
    broken = content["broken"]
    if not isinstance(broken, list):
        raise ValueError("broken is no list")
    return PackedBlock(
        num_images=int(str(content["num_images"])),
        sha256=str(content["sha256"]),
        broken=tuple((str(path), str(reason)) for path, reason in broken),
    )


def _check_size(path: Path, expected: int) -> None:
    found = path.stat().st_size if path.is_file() else None
    if found != expected:
        what = "is missing" if found is None else f"has {found} bytes instead of {expected}"
        raise DataError(f"{path} {what}. {_again(path.parent)}")


def _again(directory: Path) -> str:
    return f"Remove {directory} and pack it again"
