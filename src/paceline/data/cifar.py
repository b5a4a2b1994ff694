"""CIFAR-10 and CIFAR-100: 60,000 photographs of 32x32 in colour, the "python version" files.

Described at https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.download import ArchivedSet, RemoteFile, advice, find_files
from paceline.data.memory import TensorData
from paceline.data.pickled import read_pickled
from paceline.errors import DataError

_SHAPE = (3, 32, 32)
_MIRRORS = ("https://www.cs.toronto.edu/~kriz/",)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """What differs between the two sets."""

    source: ArchivedSet
    train: tuple[str, ...]
    test: tuple[str, ...]
    labels: str
    """Key of the labels in each file."""
    meta: str
    names: str
    """Key of the class names in the file `meta`."""
    num_classes: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


_TRAIN_10 = tuple(f"data_batch_{number}" for number in range(1, 6))
_CIFAR_10 = _Kind(
    source=ArchivedSet(
        title="CIFAR-10",
        archive=RemoteFile(
            "cifar-10-python.tar.gz",
            170_498_071,
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        ),
        mirrors=_MIRRORS,
        folder="cifar-10-batches-py",
        files=(*_TRAIN_10, "test_batch", "batches.meta"),
    ),
    train=_TRAIN_10,
    test=("test_batch",),
    labels="labels",
    meta="batches.meta",
    names="label_names",
    num_classes=10,
    mean=(0.4914, 0.4822, 0.4465),
    std=(0.2470, 0.2435, 0.2616),
)
_CIFAR_100 = _Kind(
    source=ArchivedSet(
        title="CIFAR-100",
        archive=RemoteFile(
            "cifar-100-python.tar.gz",
            169_001_437,
            "85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
        ),
        mirrors=_MIRRORS,
        folder="cifar-100-python",
        files=("train", "test", "meta"),
    ),
    train=("train",),
    test=("test",),
    labels="fine_labels",
    meta="meta",
    names="fine_label_names",
    num_classes=100,
    mean=(0.5071, 0.4865, 0.4409),
    std=(0.2673, 0.2564, 0.2762),
)


def load_cifar10(
    data_dir: Path,
    download: bool = True,
    *,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[TensorData, TensorData]:
    """Load CIFAR-10, downloading what is missing.

    Every worker may call this at once; one of a node downloads and unpacks, the others wait.

    Args:
        data_dir: Holds the archive, the folder `cifar-10-batches-py` or the files themselves.
        download: Whether the archive may be downloaded (170 MB, into `data_dir`).
        report: Told what is being downloaded.

    Returns:
        Training data and test data, three channels of 32x32.

    Raises:
        DataError: A file is missing and can't be downloaded, or damaged; names the file.
    """
    paths = find_files(_CIFAR_10.source, data_dir, download, report=report)
    return _load(_CIFAR_10, paths)


def load_cifar100(
    data_dir: Path,
    download: bool = True,
    *,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[TensorData, TensorData]:
    """Load CIFAR-100 with its 100 fine classes (169 MB); all else as for `load_cifar10`."""
    paths = find_files(_CIFAR_100.source, data_dir, download, report=report)
    return _load(_CIFAR_100, paths)


def _load(kind: _Kind, folder: Path) -> tuple[TensorData, TensorData]:
    names = _class_names(kind, folder / kind.meta)
    title = kind.source.title
    return (
        _load_part(title, kind, [folder / name for name in kind.train], names),
        _load_part(f"{title} test", kind, [folder / name for name in kind.test], names),
    )


def _class_names(kind: _Kind, path: Path) -> tuple[str, ...]:
    names = read_pickled(path, advice(kind.source)).get(kind.names)
    listed = [_as_text(name) for name in names] if isinstance(names, list) else []
    if len(listed) != kind.num_classes:
        raise DataError(
            f"{path}: should name {kind.num_classes} classes under {kind.names!r}, but names "
            f"{len(listed)}. {advice(kind.source)}"
        )
    return tuple(listed)


def _as_text(name: object) -> str:
    return name.decode("latin-1") if isinstance(name, bytes) else str(name)


def _load_part(
    title: str, kind: _Kind, paths: Sequence[Path], names: tuple[str, ...]
) -> TensorData:
    parts = [_read_batch(kind, path) for path in paths]
    return TensorData(
        name=title,
        images=torch.from_numpy(np.concatenate([images for images, _ in parts])),
        labels=torch.from_numpy(np.concatenate([labels for _, labels in parts])),
        class_names=names,
        mean=kind.mean,
        std=kind.std,
    )


def _read_batch(kind: _Kind, path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    content = read_pickled(path, advice(kind.source))
    images, labels = content.get("data"), content.get(kind.labels)
    width = int(np.prod(_SHAPE))
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != width:
        actual = images.shape if isinstance(images, np.ndarray) else type(images).__name__
        raise DataError(
            f"{path}: 'data' should be an array of (samples, {width}) bytes, but is {actual}. "
            + advice(kind.source)
        )
    if not isinstance(labels, list) or len(labels) != len(images):
        actual = len(labels) if isinstance(labels, list) else type(labels).__name__
        raise DataError(
            f"{path}: {kind.labels!r} should list a label for each of {len(images)} images, but "
            f"holds {actual}. {advice(kind.source)}"
        )
    return images.reshape(-1, *_SHAPE), _checked_labels(kind, path, labels)


def _checked_labels(kind: _Kind, path: Path, labels: Sequence[object]) -> NDArray[np.int64]:
    for position, label in enumerate(labels):
        if not isinstance(label, int) or not 0 <= label < kind.num_classes:
            raise DataError(
                f"{path}: label {label!r} at position {position} is none of 0 to "
                f"{kind.num_classes - 1}. {advice(kind.source)}"
            )
    return np.array(labels, dtype=np.int64)
