import io
import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from torchvision.datasets import ImageFolder

from paceline.data import imagefolder
from paceline.data.decode import decoded_to
from paceline.data.imagefolder import find_broken, load_image_folder, read_file, scan_tree
from paceline.errors import DataError
from tests.support.image_files import CLASSES, truncate, write_image_folder


def break_two(root: Path) -> None:
    truncate(root / "train" / "ant" / "000.jpg")
    (root / "val" / "cat" / "003.bmp").write_bytes(b"no image")


def test_items_are_raw_images_and_class_numbers(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    splits = load_image_folder(tmp_path, size=32, jobs=1)
    assert {name: len(split) for name, split in splits.items()} == {"train": 24, "val": 12}
    train = splits["train"]
    image, label = train[9]
    wanted = decoded_to((tmp_path / "train" / "bee" / "001.png").read_bytes(), 32)
    assert torch.equal(image, wanted)
    assert (label, image.dtype, image.shape) == (1, torch.uint8, (3, 32, 32))
    assert train.class_names == CLASSES
    assert train.labels == sorted([0, 1, 2] * 8)


def test_broken_images_are_all_named(tmp_path: Path) -> None:
    break_two(write_image_folder(tmp_path))
    with pytest.raises(DataError) as caught:
        load_image_folder(tmp_path, jobs=1)
    lines = str(caught.value).splitlines()
    assert lines[0] == "2 images are broken:"
    assert lines[1].startswith(f"  {tmp_path}/train/ant/000.jpg: image file is truncated")
    assert lines[2] == f"  {tmp_path}/val/cat/003.bmp: it is no image of a known format"
    assert "leave them out with --on-broken skip (on_broken='skip')" in lines[3]


def test_broken_images_are_left_out(tmp_path: Path) -> None:
    break_two(write_image_folder(tmp_path))
    told: list[str] = []
    splits = load_image_folder(tmp_path, size=32, on_broken="skip", jobs=1, report=told.append)
    assert {name: len(split) for name, split in splits.items()} == {"train": 23, "val": 11}
    assert splits["train"].labels.count(0) == 7
    assert "looking for broken images among the 36" in told[0]
    assert "2 images are broken" in told[1]
    assert len([splits["train"][i] for i in range(23)]) == 23


def test_the_pass_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_two(write_image_folder(tmp_path))
    first = find_broken(scan_tree(tmp_path), 32, jobs=1)
    monkeypatch.setattr(imagefolder, "_check_images", None)
    assert find_broken(scan_tree(tmp_path), 32) == first
    monkeypatch.undo()
    (tmp_path / "val" / "cat" / "003.bmp").unlink()
    assert list(find_broken(scan_tree(tmp_path), 32, jobs=1)) == ["train/ant/000.jpg"]


def test_several_processes_find_the_same(tmp_path: Path) -> None:
    break_two(write_image_folder(tmp_path))
    tree = scan_tree(tmp_path)
    one = find_broken(tree, 32, cache_dir=tmp_path / "a", jobs=1)
    assert find_broken(tree, 32, cache_dir=tmp_path / "b", jobs=3) == one


def _load(root: Path, told: Path) -> None:
    def report(text: str) -> None:
        with told.open("a") as file:
            file.write(text.partition(" ")[0] + "\n")

    assert len(load_image_folder(root, 32, "skip", jobs=1, report=report)["train"]) == 23


def test_one_of_several_workers_looks(tmp_path: Path) -> None:
    break_two(write_image_folder(tmp_path / "tree"))
    context = multiprocessing.get_context("fork")
    arguments = (tmp_path / "tree", tmp_path / "told")
    workers = [context.Process(target=_load, args=arguments) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert (tmp_path / "told").read_text().split().count("looking") == 1


def test_where_the_folder_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_image_folder(tmp_path / "tree")
    (tmp_path / "tree" / ".paceline").write_text("in the way")
    monkeypatch.setattr(imagefolder, "_home", lambda: tmp_path / "home")
    load_image_folder(tmp_path / "tree", jobs=1)
    assert len(list((tmp_path / "home").glob("broken-*.json"))) == 1
    (tmp_path / "home2").write_text("in the way")
    monkeypatch.setattr(imagefolder, "_home", lambda: tmp_path / "home2")
    with pytest.raises(DataError, match=r"can't be kept: .*home2 can't be written"):
        load_image_folder(tmp_path / "tree", jobs=1)


def test_a_file_that_changed_since_is_named(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    train = load_image_folder(tmp_path, jobs=1)["train"]
    truncate(tmp_path / "train" / "ant" / "000.jpg")
    with pytest.raises(DataError, match=r"ant/000.jpg: the image is broken: image file is trunc"):
        train[0]
    (tmp_path / "train" / "ant" / "000.jpg").unlink()
    with pytest.raises(DataError, match=r"ant/000.jpg: the file can't be read: No such file"):
        train[0]


def test_a_split_without_good_images(tmp_path: Path) -> None:
    write_image_folder(tmp_path, {"train": 2, "val": 1})
    for path in (tmp_path / "val").rglob("*.jpg"):
        path.write_bytes(io.BytesIO(b"x").read())
    with pytest.raises(DataError, match="val: holds no image that could be used"):
        load_image_folder(tmp_path, on_broken="skip", jobs=1)


def test_a_file_that_is_too_large_for_an_image_is_broken(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    large = tmp_path / "train" / "ant" / "000.jpg"
    os.truncate(large, 1 << 40)
    found = find_broken(scan_tree(tmp_path), 32, jobs=1)
    assert found == {"train/ant/000.jpg": "its 1,099,511,627,776 bytes are too many for an image"}


@pytest.mark.parametrize("what", ["pipe", "/dev/zero"])
def test_what_has_become_no_regular_file_is_not_read(tmp_path: Path, what: str) -> None:
    path = tmp_path / "image.jpg"
    os.mkfifo(path) if what == "pipe" else path.symlink_to(what)
    with pytest.raises(DataError, match="and so no image"):
        read_file(path)


def test_order_and_classes_are_torchvisions(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    more = tmp_path / "train" / "bee" / "below" / "deeper"
    more.mkdir(parents=True)
    (tmp_path / "train" / "ant" / "000.jpg").rename(more / "B.JPG")
    (tmp_path / "train" / "ant" / "001.png").rename(more.parent / "a.png")
    (more / "notes.txt").write_text("no image")
    (more / "c.tiff").write_bytes((tmp_path / "train" / "ant" / "003.bmp").read_bytes())
    tree = scan_tree(tmp_path)
    assert tree.class_names == CLASSES
    for split, entries in tree.splits.items():
        theirs = ImageFolder(tmp_path / split)
        assert list(tree.class_names) == theirs.classes
        found = [(str(tmp_path / entry.path), entry.label) for entry in entries]
        assert found == theirs.samples


def test_names_that_begin_with_a_dot_are_left_out(tmp_path: Path) -> None:
    write_image_folder(tmp_path)
    found = scan_tree(tmp_path).splits
    ant = tmp_path / "train" / "ant"
    (ant / "._000.jpg").write_bytes(b"what macOS leaves")
    (ant / ".trash").mkdir()
    (ant / "001.png").rename(ant / ".trash" / "001.png")
    left = [entry for entry in found["train"] if entry.path != "train/ant/001.png"]
    assert [entry.path for entry in scan_tree(tmp_path).splits["train"]] == [e.path for e in left]


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
