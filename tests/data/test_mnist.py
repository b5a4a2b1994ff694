import gzip
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import FashionMNIST

from paceline.data.mnist import load_fashion_mnist, load_mnist, read_idx
from paceline.errors import DataError
from tests.support.idx_files import idx_bytes, write_idx, write_mnist

IMAGES = "train-images-idx3-ubyte"
LABELS = "t10k-labels-idx1-ubyte"


@pytest.fixture(scope="module")
def mnist_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mnist(tmp_path_factory.mktemp("mnist"), train=50, test=20)


@pytest.mark.parametrize("below", [".", "MNIST/raw"])
@pytest.mark.parametrize("gz", [False, True])
def test_loads_from_both_places(tmp_path: Path, below: str, gz: bool) -> None:
    write_mnist(tmp_path / below, train=50, test=20, gz=gz)
    train, test = load_mnist(tmp_path, download=False)
    assert train.images.shape == (50, 1, 28, 28)
    assert test.images.shape == (20, 1, 28, 28)
    assert train.labels.dtype == torch.int64
    assert train.labels[:10].tolist() == list(range(10))
    assert (train.num_classes, train.mean, train.std) == (10, (0.1307,), (0.3081,))


@pytest.mark.usefixtures("offline")
def test_complete_files_need_no_network(mnist_dir: Path) -> None:
    load_mnist(mnist_dir)


def test_missing_files_are_named(mnist_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train-images.*t10k-labels.*Download from https://"):
        load_mnist(tmp_path, download=False)


@pytest.mark.usefixtures("offline")
def test_offline_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_mnist(tmp_path)
    message = str(caught.value)
    assert "no route to host" in message
    assert "https://ossci-datasets.s3.amazonaws.com/mnist/train-images-idx3-ubyte.gz" in message
    assert f"put it into {tmp_path / 'MNIST' / 'raw'}" in message


def overwrite(directory: Path, name: str, values: np.ndarray) -> Path:
    return write_idx(directory / name, values.astype(np.uint8), gz=True)


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        (IMAGES, np.zeros((50, 8, 8)), "should hold images of 28x28"),
        (IMAGES, np.zeros((0, 28, 28)), "should hold images of 28x28"),
        (IMAGES, np.zeros(50), "should hold images of 28x28"),
        (LABELS, np.zeros(19), "don't belong together"),
        (LABELS, np.zeros((20, 1)), "don't belong together"),
        (LABELS, np.arange(20), "label 10 at position 10 is none of 0 to 9"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, name: str, values: np.ndarray, message: str) -> None:
    write_mnist(tmp_path, train=50, test=20)
    path = overwrite(tmp_path, name, values)
    with pytest.raises(DataError, match=f"{re.escape(str(path))}: .*{message}.*https://.*{name}"):
        load_mnist(tmp_path)


def test_a_truncated_file_says_where_to_get_it(tmp_path: Path) -> None:
    write_mnist(tmp_path, train=50, test=20)
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=rf"{IMAGES}.gz: .*truncated.*Delete it and get it from"):
        load_mnist(tmp_path)


def test_fashion_mnist_has_its_own_place_and_names(tmp_path: Path) -> None:
    write_mnist(tmp_path / "FashionMNIST" / "raw", train=50, test=20)
    train, test = load_fashion_mnist(tmp_path, download=False)
    assert (train.name, test.name) == ("Fashion-MNIST", "Fashion-MNIST test")
    assert (train.num_samples, test.num_samples) == (50, 20)
    assert train.class_names == tuple(FashionMNIST.classes)
    with pytest.raises(DataError, match="MNIST is not complete"):
        load_mnist(tmp_path, download=False)


@pytest.mark.usefixtures("offline")
def test_fashion_mnist_offline(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tf-keras-datasets/train-images-idx3-ubyte.gz"):
        load_fashion_mnist(tmp_path)


VALUES = np.arange(60, dtype=np.uint8).reshape(3, 4, 5)
CONTENT = idx_bytes(VALUES)
ZIPPED = gzip.compress(CONTENT, mtime=0)


@pytest.mark.parametrize("gz", [False, True])
@pytest.mark.parametrize("values", [VALUES, VALUES[0, 0], VALUES[:0]])
def test_reads_what_was_written(tmp_path: Path, gz: bool, values: np.ndarray) -> None:
    found = read_idx(write_idx(tmp_path / "file", values, gz=gz))
    assert found.dtype == np.uint8
    assert found.shape == values.shape
    assert np.array_equal(found, values)


def test_gzip_is_seen_from_the_content(tmp_path: Path) -> None:
    path = tmp_path / "named-otherwise"
    path.write_bytes(ZIPPED)
    assert np.array_equal(read_idx(path), VALUES)


def with_flipped_crc(content: bytes) -> bytes:
    zipped = bytearray(gzip.compress(content, mtime=0))
    zipped[-8] ^= 1
    return bytes(zipped)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (b"", "no IDX file: it begins with nothing"),
        (b"<html>not found</html>", "no IDX file: it begins with 3c 68 74 6d"),
        (CONTENT[:3], "no IDX file"),
        (b"\0\0\x0d" + CONTENT[3:], "numbers of type 0x0d, not unsigned bytes"),
        (b"\0\0\x08\0", "no IDX file"),
        (CONTENT[:9], "truncated: it ends within the header"),
        (CONTENT[:-1], "truncated: 59 of 60 bytes"),
        (CONTENT + b"\0", "corrupt: it goes on after the 60 bytes"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "corrupt: its header states the shape"),
        (ZIPPED[:-12], "truncated: its gzip data ends too early"),
        (ZIPPED[:20], "truncated"),
        (with_flipped_crc(CONTENT), "corrupt: CRC check failed"),
        (ZIPPED[:10] + b"\xff" * 30, "corrupt: Error -3"),
        (ZIPPED + b"rest", "corrupt: Not a gzipped file"),
        (gzip.compress(CONTENT[:-1], mtime=0), "truncated: 59 of 60 bytes"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_a_broken_file_is_named(tmp_path: Path, broken: bytes, message: str) -> None:
    path = tmp_path / "train-images"
    path.write_bytes(broken)
    with pytest.raises(DataError, match=f"{re.escape(str(path))}: .*{message}.* Get it there"):
        read_idx(path, "Get it there")


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda path: None, "the file is missing"), (Path.mkdir, "can't be read: Is a directory")],
)
def test_no_file(tmp_path: Path, make: Callable[[Path], None], message: str) -> None:
    path = tmp_path / "train-images"
    make(path)
    with pytest.raises(DataError, match=f"train-images: .*{message}"):
        read_idx(path)
