"""MNIST, and other sets of 28x28 images in ten classes that come as the same four IDX files."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from paceline.data.download import OpenUrl, RemoteFile, download_files
from paceline.data.idx import read_idx
from paceline.data.memory import TensorData
from paceline.errors import DataError

_FILES = (
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
)
_MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
_TORCHVISION = Path("MNIST", "raw")
"""Where torchvision keeps the files below its root; downloads go there as well."""
_MEAN = (0.1307,)
_STD = (0.3081,)


def load_mnist(
    data_dir: Path,
    download: bool = True,
    *,
    report: Callable[[str], None] = lambda text: None,
    open_url: OpenUrl | None = None,
) -> tuple[TensorData, TensorData]:
    """Load MNIST, downloading what is missing.

    Every worker may call this at once; one of a node downloads, the others wait.

    Args:
        data_dir: Holds the four files, gzipped or not, or has them in MNIST/raw (torchvision).
        download: Whether missing files may be downloaded (12 MB, into MNIST/raw).
        report: Told what is being downloaded.
        open_url: Opens an address; the default speaks https only.

    Returns:
        Training data and test data, one channel of 28x28.

    Raises:
        DataError: A file is missing and can't be downloaded, truncated or corrupt, or files don't
            belong together; names the file and says where to get it.
    """
    missing = [file for file in _FILES if _find(data_dir, file) is None]
    if missing and not download:
        raise DataError(
            f"MNIST is not complete in {data_dir}: "
            f"{', '.join(file.name for file in missing)} (or without .gz) missing. "
            f"Download from {_MIRRORS[0]} and put there, or allow the download"
        )
    if missing:
        target = data_dir / _TORCHVISION
        download_files(target, missing, _MIRRORS, report=report, open_url=open_url)
    train_images, train_labels, test_images, test_labels = _FILES
    return (
        _load_part("MNIST", data_dir, train_images, train_labels),
        _load_part("MNIST test", data_dir, test_images, test_labels),
    )


def _find(data_dir: Path, file: RemoteFile) -> Path | None:
    """Look for a file in both places, unzipped first."""
    plain = file.name.removesuffix(".gz")
    for folder in (data_dir, data_dir / _TORCHVISION):
        for name in (plain, file.name):
            if (folder / name).is_file():
                return folder / name
    return None


def _load_part(
    name: str, data_dir: Path, images_file: RemoteFile, labels_file: RemoteFile
) -> TensorData:
    images_path = _find(data_dir, images_file) or data_dir / images_file.name
    labels_path = _find(data_dir, labels_file) or data_dir / labels_file.name
    images = read_idx(images_path, _advice(images_file))
    labels = read_idx(labels_path, _advice(labels_file))
    if images.ndim != 3 or images.shape[1:] != (28, 28) or not len(images):
        raise DataError(
            f"{images_path}: should hold images of 28x28, but has the shape {images.shape}. "
            + _advice(images_file)
        )
    if labels.shape != images.shape[:1]:
        raise DataError(
            f"{labels_path}: holds labels of the shape {labels.shape}, but {images_path} has "
            f"{len(images)} images: the two don't belong together. {_advice(labels_file)}"
        )
    if labels.max() > 9:
        position = int(np.argmax(labels > 9))
        raise DataError(
            f"{labels_path}: label {labels[position]} at position {position} is no digit 0 to 9. "
            + _advice(labels_file)
        )
    return TensorData(
        name=name,
        images=torch.from_numpy(images)[:, None],
        labels=torch.from_numpy(labels.astype(np.int64)),
        class_names=tuple(str(digit) for digit in range(10)),
        mean=_MEAN,
        std=_STD,
    )


def _advice(file: RemoteFile) -> str:
    return f"Delete it and get it from {_MIRRORS[0]}{file.name}"
