from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from paceline.data.image_folder import ImageSplit, find_broken, load_image_folder
from paceline.errors import DataError
from tests.support.image_files import CLASSES, truncate, write_image_folder
from tests.support.ranks import run_ranks

TRANSFORMS = dict.fromkeys(("train", "val", "test"), v2.Compose([v2.PILToTensor()]))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is known of broken images is kept there."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return write_image_folder(tmp_path / "photos", {"train": 3, "val": 2, "test": 1})


def load(root: Path, skip: bool = False) -> Mapping[str, ImageSplit]:
    return load_image_folder(root, TRANSFORMS, "skip" if skip else "error")


def test_the_splits_are_torchvisions(photos: Path) -> None:
    splits = load(photos)
    assert {name: len(split) for name, split in splits.items()} == {"train": 9, "val": 6, "test": 3}
    assert splits["train"].class_names == CLASSES
    path, label = splits["val"].samples[3]
    assert (Path(path).parent.name, label) == ("bee", 1)
    image, target = splits["val"][3]
    assert torch.equal(image, v2.functional.pil_to_tensor(Image.open(path).convert("RGB")))
    assert target == 1


def test_a_broken_image_is_named_where_it_is_read(photos: Path) -> None:
    broken = photos / "train" / "bee" / "001.png"
    truncate(broken)
    train = load(photos)["train"]
    (index,) = (i for i, (path, _) in enumerate(train.samples) if path == str(broken))
    with pytest.raises(DataError) as caught:
        train[index]
    assert str(broken) in str(caught.value)
    assert "--on-broken skip" in str(caught.value)


def test_broken_images_are_left_out_alike_on_all_workers(
    photos: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    cut, empty = photos / "train" / "bee" / "001.png", photos / "val" / "ant" / "000.jpg"
    truncate(cut)
    empty.write_bytes(b"")
    left = run_ranks(3, lambda group: [s.samples for s in load(photos, skip=True).values()])
    assert left[0] == left[1] == left[2]
    assert [len(samples) for samples in left[0]] == [8, 5, 3]
    splits = load(photos, skip=True)
    assert splits["train"].targets == [label for _, label in left[0][0]]
    assert splits["train"].imgs == left[0][0]
    printed = capfd.readouterr().out
    assert str(cut) in printed
    assert str(empty) in printed


def test_images_are_looked_at_once_until_one_changes(
    photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [path for path, _ in load(photos)["train"].samples]
    assert find_broken(paths) == {}
    truncate(Path(paths[4]), 0.4)
    assert list(find_broken(paths)) == paths[4:5]
    monkeypatch.setattr("paceline.data.image_folder.load_rgb", None)  # nothing is decoded again
    assert list(find_broken(paths)) == paths[4:5]


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_split_that_is_missing(split: str, photos: Path) -> None:
    (photos / split).rename(photos / "other")
    with pytest.raises(DataError, match=f"{split} is missing.* {split}/CLASS/IMAGE"):
        load(photos)


def test_splits_need_the_same_classes(photos: Path) -> None:
    (photos / "val" / "cat").rename(photos / "val" / "dog")
    with pytest.raises(DataError, match="val has the classes ant, bee, dog"):
        load(photos)
    (photos / "val" / "dog").rename(photos / "val" / "cat")
    for path in (photos / "val" / "cat").iterdir():
        path.unlink()
    assert len(load(photos)["val"]) == 4  # an empty folder is enough


def test_a_class_without_training_images(photos: Path) -> None:
    (photos / "train" / "dog").mkdir()
    with pytest.raises(DataError, match="dog"):
        load(photos)
