import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10

from paceline.data.cifar import load_cifar10, load_cifar100
from paceline.errors import DataError
from tests.support.cifar_files import (
    CIFAR_10_NAMES,
    coloured_digits,
    pack_folder,
    python2_pickle,
    write_cifar10,
    write_cifar100,
)


@pytest.mark.usefixtures("offline")
def test_loads_cifar10(tmp_path: Path) -> None:
    write_cifar10(tmp_path, train=52, test=20)
    train, test = load_cifar10(tmp_path)
    images, labels = coloured_digits(52, 0, side=32)
    assert torch.equal(train.images, torch.from_numpy(images))
    assert train.labels.tolist() == labels.tolist()
    assert test.images.shape == (20, 3, 32, 32)
    assert train.class_names == test.class_names == tuple(CIFAR_10_NAMES)
    assert (train.name, test.name) == ("CIFAR-10", "CIFAR-10 test")


def test_equals_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: True)
    write_cifar10(tmp_path)
    train, test = load_cifar10(tmp_path)
    for ours, theirs in ((train, CIFAR10(tmp_path)), (test, CIFAR10(tmp_path, train=False))):
        assert list(ours.class_names) == theirs.classes
        assert ours.labels.tolist() == theirs.targets
        np.testing.assert_array_equal(ours.images.permute(0, 2, 3, 1).numpy(), theirs.data)


def test_loads_cifar100(tmp_path: Path) -> None:
    write_cifar100(tmp_path)
    train, test = load_cifar100(tmp_path, download=False)
    assert (train.num_samples, test.num_samples, train.num_classes) == (50, 20, 100)
    assert train.labels.tolist() == coloured_digits(50, 0, side=32)[1].tolist()
    assert train.class_names[99] == "class99"


def test_the_files_may_lie_in_the_directory_itself(tmp_path: Path) -> None:
    train, _ = load_cifar10(write_cifar10(tmp_path), download=False)
    assert train.num_samples == 50


@pytest.mark.parametrize(
    ("write", "load"), [(write_cifar10, load_cifar10), (write_cifar100, load_cifar100)]
)
def test_a_packed_archive_is_unpacked(
    tmp_path: Path, write: Callable[[Path], Path], load: Callable[..., tuple[object, object]]
) -> None:
    archive = pack_folder(write(tmp_path))
    archive.rename(tmp_path / _PUBLISHED[archive.name])
    told: list[str] = []
    load(tmp_path, download=False, report=told.append)
    load(tmp_path, download=False, report=told.append)
    assert len(told) == 1
    assert told[0].startswith("unpacking ")


_PUBLISHED = {
    "cifar-10-batches-py.tar.gz": "cifar-10-python.tar.gz",
    "cifar-100-python.tar.gz": "cifar-100-python.tar.gz",
}


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        load_cifar10(tmp_path, download=False)
    message = str(caught.value)
    assert "data_batch_1, data_batch_2" in message
    assert "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz" in message
    assert f"put it into {tmp_path}" in message


@pytest.mark.usefixtures("offline")
def test_offline_says_what_to_put_where(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no route to host.*By hand: download https://.*put it"):
        load_cifar10(tmp_path)


ROWS = np.zeros((3, 3072), np.uint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": ROWS[:, :10], "labels": [0, 1, 2]}, r"'data' should be .* but is \(3, 10\)"),
        ({"data": [1, 2], "labels": [0, 1]}, "'data' should be .* but is list"),
        ({"data": ROWS, "labels": [0, 1]}, "'labels' should list .* 3 images, but holds 2"),
        ({"data": ROWS}, "'labels' should list .* 3 images, but holds NoneType"),
        ({"data": ROWS, "labels": [0, 10, 2]}, "label 10 at position 1 is none of 0 to 9"),
        ({"data": ROWS, "labels": [0, "x", 2]}, "label 'x' at position 1 is none of 0 to 9"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, content: dict[str, object], message: str) -> None:
    path = write_cifar10(tmp_path) / "data_batch_3"
    path.write_bytes(pickle.dumps(content, 2))
    with pytest.raises(DataError, match=f"data_batch_3: {message}.*Delete it and get it from"):
        load_cifar10(tmp_path)


def test_class_names_that_do_not_fit(tmp_path: Path) -> None:
    path = write_cifar10(tmp_path) / "batches.meta"
    path.write_bytes(python2_pickle({"label_names": ["one"]}))
    with pytest.raises(DataError, match=r"batches.meta: should name 10 classes .* names 1\."):
        load_cifar10(tmp_path)
