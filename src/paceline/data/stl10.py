"""STL-10: 13,000 labelled photographs of 96x96 in colour, the binary files.

Described at https://cs.stanford.edu/~acoates/stl10/. The 100,000 unlabelled ones aren't read.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.download import ArchivedSet, RemoteFile, advice, find_files
from paceline.data.memory import TensorData
from paceline.errors import DataError

_SOURCE = ArchivedSet(
    title="STL-10",
    archive=RemoteFile(
        "stl10_binary.tar.gz",
        2_640_397_119,
        "f31fd99273a1acb8609c8db427cebb1de3f71de77758cdc0e22956e1289b9866",
    ),
    mirrors=("https://ai.stanford.edu/~acoates/stl10/",),
    folder="stl10_binary",
    files=("train_X.bin", "train_y.bin", "test_X.bin", "test_y.bin", "class_names.txt"),
)
_SHAPE = (3, 96, 96)
_CLASSES = 10
_MEAN = (0.4467, 0.4398, 0.4066)
_STD = (0.2603, 0.2566, 0.2713)


def load_stl10(
    data_dir: Path,
    download: bool = True,
    *,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[TensorData, TensorData]:
    """Load the labelled images of STL-10, downloading what is missing.

    The images keep their 96x96; `data.crop.resize` makes a batch larger (224x224 in memory would
    be 150 KB an image, 2 GB in all).

    Args:
        data_dir: Holds the archive, the folder `stl10_binary` or the files themselves.
        download: Whether the archive may be downloaded (2.6 GB, into `data_dir`).
        report: Told what is being downloaded.

    Returns:
        Training data (5,000 images) and test data (8,000), three channels of 96x96.

    Raises:
        DataError: A file is missing and can't be downloaded, or damaged; names the file.
    """
    folder = find_files(_SOURCE, data_dir, download, report=report)
    names = _class_names(folder / "class_names.txt")
    train = _load_part("STL-10", folder, "train", names)
    return train, _load_part("STL-10 test", folder, "test", names)


def _class_names(path: Path) -> tuple[str, ...]:
    names = tuple(_read_bytes(path).tobytes().decode("latin-1").split())
    if len(names) != _CLASSES:
        raise DataError(
            f"{path}: should name {_CLASSES} classes, one a line, but names {len(names)}. "
            + advice(_SOURCE)
        )
    return names


def _load_part(name: str, folder: Path, prefix: str, class_names: tuple[str, ...]) -> TensorData:
    images_path, labels_path = folder / f"{prefix}_X.bin", folder / f"{prefix}_y.bin"
    content, labels = _read_bytes(images_path), _read_bytes(labels_path)
    per_image = int(np.prod(_SHAPE))
    if len(content) % per_image or not len(content):
        raise DataError(
            f"{images_path}: {len(content)} bytes are no whole number of images of {per_image} "
            f"bytes each: the file is truncated or another one. {advice(_SOURCE)}"
        )
    if len(labels) != len(content) // per_image:
        raise DataError(
            f"{labels_path}: holds {len(labels)} labels, but {images_path} has "
            f"{len(content) // per_image} images: the two don't belong together. {advice(_SOURCE)}"
        )
    wrong = np.flatnonzero((labels < 1) | (labels > _CLASSES))
    if len(wrong):
        raise DataError(
            f"{labels_path}: label {labels[wrong[0]]} at position {wrong[0]} is none of 1 to "
            f"{_CLASSES}. {advice(_SOURCE)}"
        )
    # The binary files store images column by column, and labels from 1.
    by_columns = torch.from_numpy(content).view(-1, *_SHAPE)  # (N, C, W, H)
    return TensorData(
        name=name,
        images=by_columns.transpose(2, 3).contiguous(),
        labels=torch.from_numpy(labels.astype(np.int64)) - 1,
        class_names=class_names,
        mean=_MEAN,
        std=_STD,
    )


def _read_bytes(path: Path) -> NDArray[np.uint8]:
    try:
        return np.fromfile(path, dtype=np.uint8)
    except OSError as error:
        raise DataError(
            f"{path}: the file can't be read: {error.strerror}. {advice(_SOURCE)}"
        ) from error
