from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import STL10

from paceline.data.stl10 import load_stl10
from paceline.errors import DataError
from tests.support.cifar_files import coloured_digits, pack_folder
from tests.support.stl10_files import STL10_NAMES, write_stl10


def test_loads_the_images_upright(tmp_path: Path) -> None:
    write_stl10(tmp_path, train=30, test=12)
    train, test = load_stl10(tmp_path, download=False)
    images, labels = coloured_digits(30, 0, side=96)
    assert torch.equal(train.images, torch.from_numpy(images))
    assert train.labels.tolist() == labels.tolist()
    assert train.class_names == tuple(STL10_NAMES)
    assert test.images.shape == (12, 3, 96, 96)


def test_equals_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(STL10, "_check_integrity", lambda self: True)
    write_stl10(tmp_path)
    for ours, theirs in zip(
        load_stl10(tmp_path), (STL10(tmp_path, "train"), STL10(tmp_path, "test")), strict=True
    ):
        np.testing.assert_array_equal(ours.images.numpy(), theirs.data)
        assert theirs.labels is not None
        assert ours.labels.tolist() == theirs.labels.tolist()
        assert list(ours.class_names) == theirs.classes


def test_a_packed_archive_is_unpacked(tmp_path: Path) -> None:
    folder = write_stl10(tmp_path)
    (folder / "unlabeled_X.bin").write_bytes(b"not wanted")
    pack_folder(folder)
    assert load_stl10(tmp_path, download=False)[0].num_samples == 30
    assert not (folder / "unlabeled_X.bin").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train_X.bin", b"x" * 27647, "27647 bytes are no whole number of images of 27648 bytes"),
        ("train_X.bin", b"", "0 bytes are no whole number"),
        ("test_y.bin", b"\x01" * 19, "holds 19 labels, but .*test_X.bin has 20 images"),
        ("test_y.bin", b"\x01" * 19 + b"\0", "label 0 at position 19 is none of 1 to 10"),
        ("class_names.txt", b"one two", "should name 10 classes, one a line, but names 2"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (write_stl10(tmp_path) / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}: {message}.*Delete it and get it from https://"):
        load_stl10(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train_X.bin, .*Download https://.*stl10_binary.tar.gz"):
        load_stl10(tmp_path, download=False)
