import io
import multiprocessing
import os
from pathlib import Path

import pytest
import torch

from paceline.data import imagecheck
from paceline.data.decode import decoded_to
from paceline.data.imagecheck import find_broken, read_file
from paceline.data.imagefolder import load_image_folder
from paceline.data.imagetree import scan_tree
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
    monkeypatch.setattr(imagecheck, "_look", None)
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
    monkeypatch.setattr(imagecheck, "_home", lambda: tmp_path / "home")
    load_image_folder(tmp_path / "tree", jobs=1)
    assert len(list((tmp_path / "home").glob("broken-*.json"))) == 1
    (tmp_path / "home2").write_text("in the way")
    monkeypatch.setattr(imagecheck, "_home", lambda: tmp_path / "home2")
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
