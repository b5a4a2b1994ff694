import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.data import packed
from paceline.data.imagefolder import load_image_folder
from paceline.data.options import PackOptions
from paceline.data.packed import list_broken, load_packed, pack_images, read_index, verify_packed
from paceline.errors import DataError, StorageError, UsageError
from tests.support.image_files import CLASSES, truncate, write_image_folder

SIZE = 24
IMAGE_BYTES = 3 * SIZE * SIZE
FEW = 5 * IMAGE_BYTES
"""Blocks of five images."""
OPTIONS = PackOptions(size=SIZE, jobs=1)
SKIP = PackOptions(size=SIZE, jobs=1, on_broken="skip")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_image_folder(tmp_path / "images")


def break_two(folder: Path) -> None:
    truncate(folder / "train" / "bee" / "002.webp")
    truncate(folder / "val" / "ant" / "000.jpg")


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir())}


def assert_same_as_the_folder(folder: Path, out: Path) -> None:
    unpacked = load_image_folder(folder, SIZE, "skip", jobs=1)
    packed = load_packed(out, verify=True)
    assert packed.keys() == unpacked.keys()
    for split, data in packed.items():
        images = torch.stack(
            [image for image, _ in (unpacked[split][i] for i in range(len(data.labels)))]
        )
        assert torch.equal(data.images, images)
        assert data.labels.tolist() == unpacked[split].labels
        assert data.class_names == CLASSES
        assert data.keep_on_host


@pytest.mark.parametrize("jobs", [1, 3])
def test_the_packed_images_are_those_of_the_folder(folder: Path, jobs: int) -> None:
    done: list[tuple[int, int]] = []
    out = folder.parent / "packed"
    options = PackOptions(size=SIZE, jobs=jobs)
    pack_images(folder, out, options, block_bytes=FEW, progress=lambda *n: done.append(n))
    assert_same_as_the_folder(folder, out)
    assert done == [(n, 36) for n in (0, 5, 10, 15, 20, 24, 29, 34, 36)]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["images", "packed"]
    files = json.loads((out / "train.files.json").read_text())
    assert files[0] == "train/ant/000.jpg"


def test_broken_images_are_named_and_then_left_out(folder: Path) -> None:
    break_two(folder)
    out = folder.parent / "packed"
    with pytest.raises(
        DataError, match=r"2 images are broken:\n.*bee/002.webp.*\n.*000.jpg.*\n.*--on-b"
    ):
        pack_images(folder, out, OPTIONS, block_bytes=FEW)
    assert not out.exists()
    told: list[str] = []
    index = pack_images(folder, out, SKIP, block_bytes=FEW, report=told.append)
    assert told[0] == "resuming after 34 images"
    assert "2 images are broken" in told[1]
    assert [path for path, _ in list_broken(index)] == ["train/bee/002.webp", "val/ant/000.jpg"]
    assert_same_as_the_folder(folder, out)


def _pack_until_block(folder: Path, out: Path, last: int, jobs: int) -> None:
    def progress(done: int, total: int) -> None:
        if done >= last:
            os.kill(os.getpid(), signal.SIGKILL)

    options = PackOptions(size=SIZE, jobs=jobs, on_broken="skip")
    pack_images(folder, out, options, block_bytes=FEW, progress=progress)


@pytest.mark.parametrize(("last", "jobs"), [(0, 1), (10, 1), (24, 1), (29, 1), (36, 1), (15, 2)])
@pytest.mark.core_cases(3)
def test_an_interrupted_packing_goes_on(folder: Path, last: int, jobs: int) -> None:
    break_two(folder)
    pack_images(folder, folder.parent / "whole", SKIP, block_bytes=FEW)
    out = folder.parent / "packed"
    process = multiprocessing.get_context("fork").Process(
        target=_pack_until_block, args=(folder, out, last, jobs)
    )
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert not out.exists()
    begun: list[int] = []
    pack_images(folder, out, SKIP, block_bytes=FEW, progress=lambda done, _: begun.append(done))
    assert begun[0] == last
    assert contents(out) == contents(folder.parent / "whole")


@pytest.mark.parametrize("where", ["journal", "images", "both"])
def test_what_was_half_written_is_written_again(
    folder: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash between writing a block and noting it, or within a line of the journal."""
    pack_images(folder, folder.parent / "whole", OPTIONS, block_bytes=FEW)
    out, partial = folder.parent / "packed", folder.parent / ".packed.partial"

    def stop(done: int, total: int) -> None:
        if done == 15:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pack_images(folder, out, OPTIONS, block_bytes=FEW, progress=stop)
    if where in ("journal", "both"):
        with (partial / "journal.jsonl").open("ab") as file:
            file.write(b'{"split": "train", "num_im')
    if where in ("images", "both"):
        with (partial / "train.images").open("ab") as file:
            file.write(b"half a block")
        (partial / "train-15.block").write_bytes(b"half")
    pack_images(folder, out, OPTIONS, block_bytes=FEW)
    assert contents(out) == contents(folder.parent / "whole")


def test_a_changed_folder_is_begun_anew(folder: Path) -> None:
    break_two(folder)
    out = folder.parent / "packed"
    with pytest.raises(DataError):
        pack_images(folder, out, OPTIONS, block_bytes=FEW)
    for path in ("train/bee/002.webp", "val/ant/000.jpg"):
        (folder / path).unlink()
    told: list[str] = []
    pack_images(folder, out, OPTIONS, report=told.append)
    assert told == []
    assert_same_as_the_folder(folder, out)


def test_packing_twice_changes_nothing(folder: Path) -> None:
    out = folder.parent / "packed"
    pack_images(folder, out, OPTIONS)
    before = contents(out)
    pack_images(folder, out, OPTIONS)
    assert contents(out) == before
    with pytest.raises(UsageError, match="already holds packed images, of size 24 and of another"):
        pack_images(folder, out, PackOptions(size=16, jobs=1))
    (folder / "val" / "ant" / "000.jpg").unlink()
    with pytest.raises(UsageError, match="before it was changed: remove it"):
        pack_images(folder, out, OPTIONS)


def test_places_that_hold_something_else(folder: Path) -> None:
    with pytest.raises(UsageError, match="exists and holds no packed images"):
        pack_images(folder, folder, OPTIONS)
    (folder.parent / "file").write_text("in the way")
    with pytest.raises(UsageError, match="can't be written: Not a directory"):
        pack_images(folder, folder.parent / "file" / "packed", OPTIONS)


def test_two_at_once_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "_OWNER_S", 0.0)
    out = folder.parent / "packed"

    def again(done: int, total: int) -> None:
        with pytest.raises(UsageError, match="another process is packing into"):
            pack_images(folder, out, OPTIONS)

    pack_images(folder, out, OPTIONS, progress=again)


def test_a_full_disk_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(images: Path, block: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed, "_append", full)
    with pytest.raises(StorageError, match=r"No space left on device\. Run the command again"):
        pack_images(folder, folder.parent / "packed", OPTIONS)


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda out: flip(out / "train.images", 7 * IMAGE_BYTES), "the images 5 to 9 differs"),
        (lambda out: flip(out / "val.labels", 3), "val.labels is damaged"),
        (lambda out: truncate(out / "val.images"), r"val.images has \d+ bytes instead of 20736"),
        (lambda out: (out / "train.labels").unlink(), "train.labels is missing"),
        (lambda out: truncate(out / "index.json"), "index.json can't be read"),
        (lambda out: (out / "index.json").unlink(), "holds no packed images: .* `paceline pack"),
        (lambda out: (out / "index.json").write_text('{"format": 9}'), "in the format 9, but"),
    ],
)
def test_damage_is_found(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    out = folder.parent / "packed"
    pack_images(folder, out, OPTIONS, block_bytes=FEW)
    verify_packed(out)
    damage(out)
    with pytest.raises(DataError, match=message):
        load_packed(out, verify=True)


def test_the_files_are_not_changed_by_what_is_done_to_the_images(folder: Path) -> None:
    out = folder.parent / "packed"
    pack_images(folder, out, OPTIONS)
    load_packed(out)["train"].images.zero_()
    verify_packed(out)


def test_the_index_tells_all(folder: Path) -> None:
    break_two(folder)
    out = folder.parent / "packed"
    written = pack_images(folder, out, SKIP, block_bytes=FEW)
    assert read_index(out) == written
    assert (written.size, written.class_names) == (SIZE, CLASSES)
    assert {name: split.num_images for name, split in written.splits.items()} == {
        "train": 23,
        "val": 11,
    }


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match="size is 0: it must be at least 1"):
        PackOptions(size=0)
    with pytest.raises(UsageError, match="jobs is 0: it must be at least 1"):
        PackOptions(jobs=0)
