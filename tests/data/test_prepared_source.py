"""A folder, its packed form on the host, and the same images on the device give equal batches."""

import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.data.augment import Augment, RandomFlip, RandomShift
from paceline.data.batch import Batch, BatchSource
from paceline.data.imagefolder import load_image_folder
from paceline.data.loading.loader import LoaderSource
from paceline.data.memory import MemorySource, PreparedSource, TensorData
from paceline.data.options import PackOptions
from paceline.data.order import EpochPlan
from paceline.data.packed import load_packed, pack_images
from tests.support.image_files import write_image_folder

SIZE = 24
LAYOUTS = [torch.contiguous_format, torch.channels_last]
AUGMENT: Sequence[Augment] = (RandomShift(2), RandomFlip())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = write_image_folder(tmp_path_factory.mktemp("tree") / "images")
    pack_images(root, root.parent / "packed", PackOptions(size=SIZE, jobs=1))
    return root


def packed(folder: Path) -> TensorData:
    return load_packed(folder.parent / "packed")["train"]


def from_folder(
    folder: Path, layout: torch.memory_format, augment: Sequence[Augment], loader_workers: int = 0
) -> PreparedSource:
    images = load_image_folder(folder, SIZE, jobs=1)["train"]
    raw = LoaderSource(images, loader_workers=loader_workers)
    return PreparedSource(raw, images, memory_format=layout, augment=augment)


def plan(part: int = 0, parts: int = 1, first_step: int = 0) -> EpochPlan:
    return EpochPlan(seed=3, epoch=1, global_batch=7, part=part, parts=parts, first_step=first_step)


def assert_same(left: Iterator[Batch], right: Iterator[Batch]) -> int:
    count = 0
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert a.inputs.stride() == b.inputs.stride()
        assert torch.equal(a.targets, b.targets)
        assert a.indices.tolist() == b.indices.tolist()
        assert (a.local, a.total) == (b.local, b.total)
        count += 1
    return count


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("augment", [(), AUGMENT])
def test_folder_packed_and_memory_give_the_same(
    folder: Path, layout: torch.memory_format, augment: Sequence[Augment]
) -> None:
    data = packed(folder)
    sources: list[BatchSource] = [
        from_folder(folder, layout, augment),
        MemorySource(data, memory_format=layout, augment=augment),
        MemorySource(replace(data, keep_on_host=False), memory_format=layout, augment=augment),
    ]
    for first, second in itertools.pairwise(sources):
        for part in (0, 2):
            assert (
                assert_same(first.train_batches(plan(part, 4)), second.train_batches(plan(part, 4)))
                == 4
            )
        resumed = first.train_batches(plan(1, 4, 2)), second.train_batches(plan(1, 4, 2))
        assert assert_same(*resumed) == 2
        assert assert_same(first.eval_batches(1, 2, 5), second.eval_batches(1, 2, 5)) == 3
    for source in sources:
        source.close()


def test_loader_processes_change_nothing(folder: Path) -> None:
    alone = from_folder(folder, torch.contiguous_format, AUGMENT)
    parallel = from_folder(folder, torch.contiguous_format, AUGMENT, loader_workers=2)
    assert assert_same(alone.train_batches(plan()), parallel.train_batches(plan())) == 4
    parallel.close()


def test_an_empty_share_gets_the_same_stand_in(folder: Path) -> None:
    last = [
        list(source.train_batches(plan(3, 4)))[-1]
        for source in (
            from_folder(folder, torch.contiguous_format, AUGMENT),
            MemorySource(packed(folder), augment=AUGMENT),
        )
    ]
    assert [batch.local for batch in last] == [0, 0]
    assert torch.equal(last[0].inputs, last[1].inputs)


def test_describe(folder: Path) -> None:
    source = from_folder(folder, torch.contiguous_format, AUGMENT)
    assert source.describe() == (
        "ImageFolder: 24 samples, read in each worker, shift by up to 2 px, random flip"
    )
    assert MemorySource(packed(folder)).describe() == (
        "packed/train: 24 images 3x24x24 in 3 classes, mapped into the host's memory"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_mapped_images_are_not_read_whole(folder: Path) -> None:
    data = packed(folder)
    mapped = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "packed/" in line
    ]
    assert any(str(folder.parent / "packed" / "train.images") in line for line in mapped)
    source = MemorySource(data, memory_format=torch.channels_last)
    assert source._images.data_ptr() == data.images.data_ptr()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_gpu_makes_the_same_batches(folder: Path, layout: torch.memory_format) -> None:
    host, device = (
        MemorySource(packed(folder), where, memory_format=layout, augment=AUGMENT)
        for where in ("cpu", "cuda")
    )
    for left, right in zip(host.train_batches(plan()), device.train_batches(plan()), strict=True):
        assert right.inputs.stride() == left.inputs.stride()
        torch.testing.assert_close(right.inputs.cpu(), left.inputs, rtol=1e-6, atol=1e-6)
        assert torch.equal(right.targets.cpu(), left.targets)
