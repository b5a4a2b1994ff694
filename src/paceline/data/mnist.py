"""MNIST and Fashion-MNIST: 28x28 images in ten classes that come as the same four IDX files.

The IDX format is described at the end of https://yann.lecun.com/exdb/mnist/.
"""

import gzip
import io
import math
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data.download import RemoteFile, download_files
from paceline.data.memory import TensorData
from paceline.errors import DataError

_GZIP_MAGIC = b"\x1f\x8b"
_UNSIGNED_BYTE = 0x08
_MAX_BYTES = 1 << 34
"""No header may ask for more memory than this (16 GiB)."""


def read_idx(path: Path, advice: str = "") -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes whole, and check it whole.

    Args:
        path: The file; whether it is gzipped is seen from its content, not from its name.
        advice: Where to get a good copy; added to every error message.

    Returns:
        uint8 array of the shape that the file states.

    Raises:
        DataError: The file is missing, unreadable, truncated, too long or no IDX file of bytes.
    """
    try:
        with path.open("rb") as file:
            # Both forms have been published: the content says which, not the name.
            zipped = file.read(2) == _GZIP_MAGIC
            file.seek(0)
            if not zipped:
                return _read_stream(file)
            with gzip.GzipFile(fileobj=file) as unzipped:
                return _read_stream(unzipped)
    except FileNotFoundError:
        reason = "the file is missing"
    except EOFError:
        reason = "the file is truncated: its gzip data ends too early"
    except (gzip.BadGzipFile, zlib.error) as error:
        reason = f"the file is corrupt: {error}"
    except OSError as error:
        reason = f"the file can't be read: {error.strerror}"
    except ValueError as error:
        reason = str(error)
    raise DataError(" ".join(f"{path}: {reason}. {advice}".split()))


def _read_stream(stream: io.BufferedIOBase) -> NDArray[np.uint8]:
    shape = _read_shape(stream)
    size = math.prod(shape)
    content = bytearray(stream.read(size))
    if len(content) < size:
        raise ValueError(
            f"the file is truncated: {len(content)} of {size} bytes after the header, "
            f"which states the shape {shape}"
        )
    if stream.read(1):  # reading to the end also makes gzip compare its checksum
        raise ValueError(f"the file is corrupt: it goes on after the {size} bytes it states")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)


def _read_shape(stream: io.BufferedIOBase) -> tuple[int, ...]:
    # IDX: two zero bytes, the type, the number of dimensions; each size as four bytes, big-endian.
    magic = stream.read(4)
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[3] == 0:
        raise ValueError(f"this is no IDX file: it begins with {magic.hex(' ') or 'nothing'}")
    if magic[2] != _UNSIGNED_BYTE:
        raise ValueError(
            f"the file holds numbers of type 0x{magic[2]:02x}, not unsigned bytes (0x08)"
        )
    sizes = stream.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise ValueError("the file is truncated: it ends within the header")
    shape = struct.unpack(f">{magic[3]}I", sizes)
    if math.prod(shape) > _MAX_BYTES:
        raise ValueError(f"the file is corrupt: its header states the shape {shape}")
    return shape


_SIDE = 28
_CLASSES = 10


@dataclass(frozen=True, kw_only=True)
class _IdxSet:
    """What differs between the sets."""

    title: str
    files: tuple[RemoteFile, RemoteFile, RemoteFile, RemoteFile]
    """Training images, training labels, test images, test labels."""
    mirrors: tuple[str, ...]
    folder: Path
    """Where torchvision keeps the files below its root; downloads go there as well."""
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]


_MNIST = _IdxSet(
    title="MNIST",
    files=(
        RemoteFile(
            "train-images-idx3-ubyte.gz",
            9_912_422,
            "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
        ),
        RemoteFile(
            "train-labels-idx1-ubyte.gz",
            28_881,
            "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
        ),
        RemoteFile(
            "t10k-images-idx3-ubyte.gz",
            1_648_877,
            "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
        ),
        RemoteFile(
            "t10k-labels-idx1-ubyte.gz",
            4_542,
            "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        ),
    ),
    mirrors=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    folder=Path("MNIST", "raw"),
    class_names=tuple(str(digit) for digit in range(_CLASSES)),
    mean=(0.1307,),
    std=(0.3081,),
)
_FASHION = _IdxSet(
    title="Fashion-MNIST",
    files=(
        RemoteFile(
            "train-images-idx3-ubyte.gz",
            26_421_880,
            "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
        ),
        RemoteFile(
            "train-labels-idx1-ubyte.gz",
            29_515,
            "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
        ),
        RemoteFile(
            "t10k-images-idx3-ubyte.gz",
            4_422_102,
            "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
        ),
        RemoteFile(
            "t10k-labels-idx1-ubyte.gz",
            5_148,
            "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        ),
    ),
    mirrors=(
        "https://storage.googleapis.com/tensorflow/tf-keras-datasets/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    folder=Path("FashionMNIST", "raw"),
    class_names=(
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
    mean=(0.2860,),
    std=(0.3530,),
)


def load_mnist(
    data_dir: Path,
    download: bool = True,
    *,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[TensorData, TensorData]:
    """Load MNIST, downloading what is missing.

    Every worker may call this at once; one of a node downloads, the others wait.

    Args:
        data_dir: Holds the four files, gzipped or not, or has them in MNIST/raw (torchvision).
        download: Whether missing files may be downloaded (12 MB, into MNIST/raw).
        report: Told what is being downloaded.

    Returns:
        Training data and test data, one channel of 28x28.

    Raises:
        DataError: A file is missing and can't be downloaded, truncated or corrupt, or files don't
            belong together; names the file and says where to get it.
    """
    return _load(_MNIST, data_dir, download, report)


def load_fashion_mnist(
    data_dir: Path,
    download: bool = True,
    *,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[TensorData, TensorData]:
    """Load Fashion-MNIST (31 MB, in FashionMNIST/raw); all else as for `load_mnist`."""
    return _load(_FASHION, data_dir, download, report)


def _load(
    kind: _IdxSet,
    data_dir: Path,
    download: bool,
    report: Callable[[str], None],
) -> tuple[TensorData, TensorData]:
    missing = [file for file in kind.files if _find(kind, data_dir, file) is None]
    if missing and not download:
        raise DataError(
            f"{kind.title} is not complete in {data_dir}: "
            f"{', '.join(file.name for file in missing)} (or without .gz) missing. "
            f"Download from {kind.mirrors[0]} and put there, or allow the download"
        )
    if missing:
        target = data_dir / kind.folder
        download_files(target, missing, kind.mirrors, report=report)
    train_images, train_labels, test_images, test_labels = kind.files
    return (
        _load_part(kind, kind.title, data_dir, (train_images, train_labels)),
        _load_part(kind, f"{kind.title} test", data_dir, (test_images, test_labels)),
    )


def _find(kind: _IdxSet, data_dir: Path, file: RemoteFile) -> Path | None:
    """Look for a file in both places, unzipped first."""
    plain = file.name.removesuffix(".gz")
    for folder in (data_dir, data_dir / kind.folder):
        for name in (plain, file.name):
            if (folder / name).is_file():
                return folder / name
    return None


def _load_part(
    kind: _IdxSet, name: str, data_dir: Path, files: tuple[RemoteFile, RemoteFile]
) -> TensorData:
    images_path, labels_path = (_find(kind, data_dir, f) or data_dir / f.name for f in files)
    images_advice, labels_advice = (
        f"Delete it and get it from {kind.mirrors[0]}{file.name}" for file in files
    )
    images = read_idx(images_path, images_advice)
    labels = read_idx(labels_path, labels_advice)
    # Files may be whole and still not be these: check shapes and labels before they are used.
    if images.ndim != 3 or images.shape[1:] != (_SIDE, _SIDE) or not len(images):
        raise DataError(
            f"{images_path}: should hold images of {_SIDE}x{_SIDE}, but has the shape "
            f"{images.shape}. {images_advice}"
        )
    if labels.shape != images.shape[:1]:
        raise DataError(
            f"{labels_path}: holds labels of the shape {labels.shape}, but {images_path} has "
            f"{len(images)} images: the two don't belong together. {labels_advice}"
        )
    if labels.max() >= _CLASSES:
        position = int(np.argmax(labels >= _CLASSES))
        raise DataError(
            f"{labels_path}: label {labels[position]} at position {position} is none of 0 to "
            f"{_CLASSES - 1}. {labels_advice}"
        )
    return TensorData(
        name=name,
        images=torch.from_numpy(images)[:, None],
        labels=torch.from_numpy(labels.astype(np.int64)),
        class_names=kind.class_names,
        mean=kind.mean,
        std=kind.std,
    )
