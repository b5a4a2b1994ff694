"""MNIST, Fashion-MNIST, CIFAR-10 and STL-10, read by NumPy from the files that torchvision keeps.

Formats: yann.lecun.com/exdb/mnist, cs.toronto.edu/~kriz/cifar.html, cs.stanford.edu/~acoates/stl10
"""

import gzip
import io
import pickle
import tarfile
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.memory import TensorData
from paceline.errors import DataError
from paceline.files import LOCK_NAME, locked
from paceline.options.text import clause

DatasetName = Literal["MNIST", "FashionMNIST", "CIFAR10", "STL10"]
Arrays = tuple[NDArray[np.uint8], NDArray[Any]]
_ADVICE = "Delete what is damaged and download it again with --download (download=True)"


def load_dataset(
    name: DatasetName, data_dir: Path, download: bool = True
) -> tuple[TensorData, TensorData]:
    """Load training and test data; torchvision downloads what is missing.

    Every worker may call this at once: one of a node downloads, the others wait.

    Args:
        name: Of the class in `torchvision.datasets`.
        data_dir: The `root` of that class; files may be gzipped.
        download: Whether missing files may be downloaded.

    Raises:
        DataError: A file is missing and can't be downloaded, or is damaged.
    """
    kind = _KINDS[name]
    folder = data_dir / kind.folder
    failure = _download(name, data_dir, folder) if download else ""
    if missing := _missing(kind, folder):
        by_hand = f"ut the files of torchvision.datasets.{name} into {folder}"
        advice = f"Download {name} with --download (download=True), or p{by_hand}"
        raise DataError(
            f"{folder / missing[0]} is missing{failure}. {f'P{by_hand}' if failure else advice}"
        )
    splits = {name: kind.train, f"{name} test": kind.test}
    train, test = (_load_split(kind, title, folder, files) for title, files in splits.items())
    return train, test


def _missing(kind: "_Kind", folder: Path) -> list[str]:
    files = (*kind.train, *kind.test)
    return [f for f in files if not any((folder / n).is_file() for n in (f, f"{f}.gz"))]


def _download(name: DatasetName, root: Path, folder: Path) -> str:
    """Let torchvision download what is missing; return what went wrong, for a message."""
    # While another worker downloads, files are there that aren't whole yet: wait for its lock.
    if not _missing(_KINDS[name], folder) and not (root / LOCK_NAME).exists():
        return ""
    import torchvision

    try:
        root.mkdir(parents=True, exist_ok=True)
        with locked(root):
            if _missing(_KINDS[name], folder):
                getattr(torchvision.datasets, name)(root, download=True)
    except (OSError, RuntimeError, EOFError, tarfile.TarError, zlib.error) as error:
        return f" and can't be downloaded ({' '.join(clause(error).split())})"
    return ""


def _load_split(kind: "_Kind", title: str, folder: Path, files: tuple[str, ...]) -> TensorData:
    images, labels = kind.read([folder / file for file in files])
    try:
        return TensorData(
            name=title,
            images=torch.from_numpy(images),
            labels=torch.from_numpy(labels.astype(np.int64)),
            class_names=tuple(kind.class_names.split(",")),
            mean=(kind.mean,) * images.shape[1],
            std=(kind.std,) * images.shape[1],
        )
    except DataError as error:
        raise DataError(f"{folder}: {clause(error)}. {_ADVICE}") from None


def _read(path: Path, parse: Callable[[bytes], Any]) -> Any:
    """Read a file, or the gzipped one beside it; a DataError says that it is damaged."""
    try:
        if path.is_file():
            return parse(path.read_bytes())
        return parse(gzip.decompress(path.with_name(f"{path.name}.gz").read_bytes()))
    except Exception as error:  # noqa: BLE001  # damaged content raises anything
        raise DataError(f"{path} can't be read: {clause(error)}. {_ADVICE}") from None


def _read_idx(paths: list[Path]) -> Arrays:
    images, labels = (_read(path, _parse_idx) for path in paths)
    return images[:, None], labels


def _parse_idx(content: bytes) -> NDArray[np.uint8]:
    # Two zero bytes, 8 for unsigned bytes, the number of dimensions; each size big-endian; values.
    if content[:3] != b"\0\0\x08":
        raise ValueError("no IDX file of bytes")
    shape = np.frombuffer(content, ">u4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(shape).copy()


def _read_cifar(paths: list[Path]) -> Arrays:
    images, labels = zip(*(_read(path, _parse_cifar) for path in paths), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _parse_cifar(content: bytes) -> Arrays:
    batch = _ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    return batch["data"].reshape(-1, 3, 32, 32), np.array(batch["labels"], dtype=np.int64)


_ARRAYS = (
    "numpy.core.multiarray._reconstruct numpy._core.multiarray._reconstruct numpy.ndarray "
    "numpy.dtype _codecs.encode"
).split()


@final
class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles NumPy arrays and plain values; nothing else that a file names is imported."""

    def find_class(self, module: str, name: str) -> Any:
        """Import what arrays are made with."""
        if f"{module}.{name}" not in _ARRAYS:
            raise pickle.UnpicklingError(f"it holds {module}.{name}, which no CIFAR file does")
        return super().find_class(module, name)


def _read_stl10(paths: list[Path]) -> Arrays:
    # Images column by column, labels from 1.
    images = _read(paths[0], lambda c: np.frombuffer(c, np.uint8).reshape(-1, 3, 96, 96))
    labels = _read(paths[1], lambda c: np.frombuffer(c, np.uint8))
    return images.swapaxes(2, 3).copy(), labels - 1


@final
@dataclass(frozen=True)
class _Kind:
    """What differs between the data sets."""

    folder: str  # below torchvision's `root`
    train: tuple[str, ...]
    test: tuple[str, ...]
    read: Callable[[list[Path]], Arrays]  # files to images, uint8 (N, C, H, W), and labels (N,)
    class_names: str
    mean: float  # of each channel
    std: float


_IDX = (
    ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
    _read_idx,
)
_KINDS: Mapping[DatasetName, _Kind] = {
    "MNIST": _Kind("MNIST/raw", *_IDX, "0,1,2,3,4,5,6,7,8,9", 0.1307, 0.3081),
    "FashionMNIST": _Kind(
        "FashionMNIST/raw",
        *_IDX,
        "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot",
        0.2860,
        0.3530,
    ),
    "CIFAR10": _Kind(
        "cifar-10-batches-py",
        tuple(f"data_batch_{number}" for number in range(1, 6)),
        ("test_batch",),
        _read_cifar,
        "airplane,automobile,bird,cat,deer,dog,frog,horse,ship,truck",
        0.5,
        0.5,
    ),
    "STL10": _Kind(
        "stl10_binary",
        ("train_X.bin", "train_y.bin"),
        ("test_X.bin", "test_y.bin"),
        _read_stl10,
        "airplane,bird,car,cat,deer,dog,horse,monkey,ship,truck",
        0.5,
        0.5,
    ),
}
