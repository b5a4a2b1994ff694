"""Files in their real formats; torchvision's own classes read the same."""

import gzip
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pytest
import torch
import torchvision

from paceline.data.datasets import DatasetName, load_dataset
from paceline.errors import DataError
from tests.support.cifar_files import python2_pickle, write_cifar10
from tests.support.idx_files import write_mnist
from tests.support.ranks import run_ranks
from tests.support.stl10_files import write_stl10

WRITERS: Mapping[DatasetName, Callable[[Path], object]] = {
    "MNIST": lambda root: write_mnist(root, 20, 10, gz=False),
    "FashionMNIST": lambda root: write_mnist(root, 20, 10, gz=False, name="FashionMNIST"),
    "CIFAR10": lambda root: write_cifar10(root, 20, 10),
    "STL10": lambda root: write_stl10(root, 20, 10),
}
NAMES = pytest.mark.parametrize("name", WRITERS)


def files_of(root: Path) -> list[Path]:
    return [p for p in sorted(root.rglob("*")) if p.is_file() and "names" not in p.name]


@NAMES
@pytest.mark.parametrize("gz", [False, True])
def test_equal_to_torchvision(
    name: DatasetName, gz: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS[name](tmp_path)
    kind = getattr(torchvision.datasets, name)
    monkeypatch.setattr(kind, "_check_integrity", lambda self: True, raising=False)  # the MD5s
    monkeypatch.setattr(kind, "_load_meta", lambda self: None, raising=False)
    split = [
        {"split": s} if name == "STL10" else {"train": s == "train"} for s in ("train", "test")
    ]
    expected = [kind(tmp_path, **which) for which in split]
    for path in files_of(tmp_path) if gz else []:
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    found = load_dataset(name, tmp_path, download=False)
    for data, other in zip(found, expected, strict=True):
        images = torch.as_tensor(other.data)
        if name == "CIFAR10":
            images = images.permute(0, 3, 1, 2)
        assert torch.equal(data.images.squeeze(1), images)
        labels = other.labels if name == "STL10" else other.targets
        assert data.labels.tolist() == torch.as_tensor(labels).tolist()
        assert len(set(data.class_names)) == 10
    assert [data.num_samples for data in found] == [20, 10]


@NAMES
def test_a_missing_file_is_named(name: DatasetName, tmp_path: Path) -> None:
    WRITERS[name](tmp_path)
    missing = next(p for p in files_of(tmp_path) if "meta" not in p.name)
    missing.unlink()
    with pytest.raises(DataError) as caught:
        load_dataset(name, tmp_path, download=False)
    assert f"{missing} is missing" in str(caught.value)
    assert "--download" in str(caught.value)
    assert "\n" not in str(caught.value)


def cut(content: bytes) -> bytes:
    return content[:-1]


@dataclass
class Evil:
    """Pickled, it calls a function where it is unpickled."""

    path: str

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path(self.path),)


DAMAGED: Mapping[str, tuple[DatasetName, str, Callable[[bytes], bytes]]] = {
    "images cut": ("MNIST", "train-images-idx3-ubyte", cut),
    "labels too long": ("MNIST", "t10k-labels-idx1-ubyte", lambda c: c + b"\0"),
    "no idx": ("FashionMNIST", "train-labels-idx1-ubyte", lambda c: b"<html>" + c),
    "numbers of four bytes": ("MNIST", "train-labels-idx1-ubyte", lambda c: b"\0\0\x0c" + c[3:]),
    "empty": ("MNIST", "train-images-idx3-ubyte", lambda c: b""),
    "stl cut": ("STL10", "test_X.bin", cut),
    "cifar cut": ("CIFAR10", "data_batch_3", cut),
    "cifar of something else": ("CIFAR10", "test_batch", lambda c: pickle.dumps([1, 2])),
    "cifar without labels": (
        "CIFAR10",
        "data_batch_1",
        lambda c: python2_pickle({"data": np.zeros((4, 3072), np.uint8)}),
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_named(case: str, tmp_path: Path) -> None:
    name, file, damage = DAMAGED[case]
    WRITERS[name](tmp_path)
    (path,) = tmp_path.rglob(file)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError) as caught:
        load_dataset(name, tmp_path, download=False)
    assert str(path) in str(caught.value)
    assert "--download" in str(caught.value)


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    root, other = write_mnist(tmp_path / "a", 20, 10), write_mnist(tmp_path / "b", 19, 10)
    labels = "MNIST/raw/train-labels-idx1-ubyte.gz"
    (root / labels).write_bytes((other / labels).read_bytes())
    with pytest.raises(DataError, match=r"MNIST/raw: .*one for each of 20 images"):
        load_dataset("MNIST", root, download=False)


def test_nothing_in_a_pickle_is_called(tmp_path: Path) -> None:
    folder = write_cifar10(tmp_path, 20, 10)
    (folder / "data_batch_2").write_bytes(pickle.dumps(Evil(str(tmp_path / "touched"))))
    with pytest.raises(DataError, match=r"data_batch_2 can't be read: it holds pathlib"):
        load_dataset("CIFAR10", tmp_path, download=False)
    assert not (tmp_path / "touched").exists()


def test_one_worker_downloads_and_the_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(root: Path, download: bool) -> None:
        with (tmp_path / "downloads").open("a") as log:
            log.write("1")
        write_cifar10(root, 20, 10)

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", download)
    root = tmp_path / "data"
    found = run_ranks(3, lambda group: load_dataset("CIFAR10", root)[0].num_samples)
    assert found == [20, 20, 20]
    assert (tmp_path / "downloads").read_text() == "1"


def test_a_failed_download_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(self: object) -> None:
        raise URLError("no route to host")

    monkeypatch.setattr(torchvision.datasets.STL10, "download", download)
    said = r"train_X.bin is missing and can't be .*no route to host.*\. Put the files of"
    with pytest.raises(DataError, match=said):
        load_dataset("STL10", tmp_path)


def test_files_that_are_there_are_not_compared_with_the_published_ones(tmp_path: Path) -> None:
    write_cifar10(tmp_path, 20, 10)
    assert load_dataset("CIFAR10", tmp_path, download=True)[1].num_samples == 10
    assert not (tmp_path / ".download.lock").exists()
