import os
from pathlib import Path

import pytest
from torchvision.datasets import ImageFolder

from paceline.data.imagetree import scan_tree
from paceline.errors import DataError
from tests.support.image_files import CLASSES, truncate, write_image_folder


def test_order_and_classes_are_torchvisions(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    more = tmp_path / "train" / "bee" / "below" / "deeper"
    more.mkdir(parents=True)
    (tmp_path / "train" / "ant" / "000.jpg").rename(more / "B.JPG")
    (tmp_path / "train" / "ant" / "001.png").rename(more.parent / "a.png")
    (more / "notes.txt").write_text("no image")
    tree = scan_tree(tmp_path)
    assert tree.class_names == CLASSES
    for split, entries in tree.splits.items():
        theirs = ImageFolder(tmp_path / split)
        assert list(tree.class_names) == theirs.classes
        found = [(str(tmp_path / entry.path), entry.label) for entry in entries]
        assert found == theirs.samples


def test_a_split_may_lack_classes_but_numbers_stay(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    for path in (tmp_path / "val" / "ant").iterdir():
        path.unlink()
    (tmp_path / "val" / "ant").rmdir()
    assert {entry.label for entry in scan_tree(tmp_path).splits["val"]} == {1, 2}


def test_the_fingerprint_changes_with_any_file(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    prints = [scan_tree(tmp_path).fingerprint()]
    path = tmp_path / "train" / "ant" / "000.jpg"
    os.utime(path, ns=(1, 1))
    prints.append(scan_tree(tmp_path).fingerprint())
    truncate(path)
    os.utime(path, ns=(1, 1))
    prints.append(scan_tree(tmp_path).fingerprint())
    path.rename(path.with_name("0000.jpg"))
    prints.append(scan_tree(tmp_path).fingerprint())
    assert len(set(prints)) == 4
    assert scan_tree(tmp_path).fingerprint() == prints[-1]


def test_trees_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no folder `train` .there is no such directory"):
        scan_tree(tmp_path / "nowhere")
    (tmp_path / "cats").mkdir()
    with pytest.raises(DataError, match=r"no folder `train` .found: cats.*train/CLASS/IMAGE"):
        scan_tree(tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="train: the folder holds no image"):
        scan_tree(tmp_path)
    (tmp_path / "train" / "cat").mkdir()
    with pytest.raises(DataError, match=r"the class 'cat' .1 such. holds no image"):
        scan_tree(tmp_path)
    (tmp_path / "train" / "cat" / "1.png").write_bytes(b"x")
    (tmp_path / "val" / "dog").mkdir(parents=True)
    with pytest.raises(DataError, match="val: the class 'dog' has no training images in"):
        scan_tree(tmp_path)


@pytest.mark.parametrize(
    ("name", "target"),
    [("train/ant/again", "train/ant"), ("train/bee/all", ""), ("val/cat/deep/more", "val/cat")],
)
def test_a_link_back_to_where_it_lies_is_refused(tmp_path: Path, name: str, target: str) -> None:
    root = write_image_folder(tmp_path / "images")
    link = root / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(root / target)
    with pytest.raises(DataError, match=f"{link}.*leads back to .*Remove that link"):
        scan_tree(root)


def test_a_link_to_a_folder_elsewhere_is_followed(tmp_path: Path) -> None:
    root = write_image_folder(tmp_path / "images")
    (root / "train" / "ant").rename(tmp_path / "elsewhere")
    (root / "train" / "ant").symlink_to(tmp_path / "elsewhere")
    tree = scan_tree(root)
    theirs = ImageFolder(root / "train")
    assert [str(root / entry.path) for entry in tree.splits["train"]] == [p for p, _ in theirs.imgs]


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    path = tmp_path / "train" / "ant" / "pipe.jpg"
    os.mkfifo(path)
    with pytest.raises(DataError, match=f"{path}: it is a named pipe, not a plain file"):
        scan_tree(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    with pytest.raises(DataError, match=f"{path}: it is a device"):
        scan_tree(tmp_path)
    path.unlink()
    path.symlink_to(path)
    with pytest.raises(DataError, match=f"can't be listed: {path}"):
        scan_tree(tmp_path)
