"""Against torchvision, sample by sample, on the boxes that were drawn."""

import pytest
import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF
from torchvision.transforms.v2 import functional as on_tensors

from paceline.data.augment import Augment
from paceline.data.crop import CenterCrop, RandomCrop, RandomResizedCrop, Resize
from paceline.errors import DataError


def images_of(num: int, height: int = 40, width: int = 31) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    shape = (num, 3, height, width)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def draws_for(num: int, augment: Augment) -> Tensor:
    return torch.rand(num, augment.num_draws, generator=torch.Generator().manual_seed(8))


def test_random_resized_crops_are_torchvisions() -> None:
    augment = RandomResizedCrop(24)
    images, draws = images_of(40), draws_for(40, RandomResizedCrop(24))
    made, exact = augment(images, draws), augment(images.float(), draws)
    boxes = augment.boxes(draws, 40, 31).to(torch.int64).tolist()
    for n, box in enumerate(boxes):
        rounded = on_tensors.resized_crop(images[n], *box, [24, 24], antialias=False)
        assert torch.equal(made[n], rounded)
        wanted = TF.resized_crop(images[n].float(), *box, [24, 24], antialias=False)
        torch.testing.assert_close(exact[n], wanted, rtol=0, atol=0.05)  # of 255
    assert len({tuple(box) for box in boxes}) == 40


def test_boxes_lie_inside_and_have_the_area_and_ratio_asked_for() -> None:
    augment = RandomResizedCrop(8, scale=(0.2, 0.9))
    boxes = augment.boxes(draws_for(5000, augment), 200, 240)
    top, left, height, width = boxes.unbind(1)
    assert torch.equal(boxes, boxes.round())
    assert min(float(top.min()), float(left.min())) == 0
    assert float((top + height).max()) == 200
    assert float((left + width).max()) == 240
    share, ratio = height * width / (200 * 240), width / height
    assert 0.19 < share.min() < 0.21
    assert 0.88 < share.max() < 0.91
    assert 0.73 < ratio.min() < 0.76
    assert 1.32 < ratio.max() < 1.36
    assert abs(float(ratio.log().median())) < 0.05  # tall boxes that don't fit are drawn again


def test_where_no_box_fits_the_middle_is_taken() -> None:
    augment = RandomResizedCrop(8, scale=(0.9, 1.0))
    boxes = augment.boxes(draws_for(50, augment), 20, 200)
    assert {tuple(box) for box in boxes.tolist()} == {(0.0, 86.0, 20.0, 27.0)}
    boxes = augment.boxes(draws_for(50, augment), 200, 20)
    assert {tuple(box) for box in boxes.tolist()} == {(86.0, 0.0, 27.0, 20.0)}


def test_random_crops_are_windows_and_all_are_equally_likely() -> None:
    image = torch.arange(20, dtype=torch.uint8).view(1, 1, 4, 5).expand(6000, 1, 4, 5)
    augment = RandomCrop(3)
    crops = augment(image, draws_for(6000, augment))
    assert crops.shape == (6000, 1, 3, 3)
    found, counts = crops[:, 0].flatten(1).unique(dim=0, return_counts=True)
    windows = image[:1].unfold(2, 3, 1).unfold(3, 3, 1).reshape(6, 9)
    assert torch.equal(found, windows)
    assert ((counts - 1000.0) ** 2 / 1000).sum() < 20.5  # chi-square, 5 degrees, 0.001


@pytest.mark.parametrize(("height", "width"), [(40, 31), (24, 24), (25, 30)])
def test_the_middle_is_torchvisions(height: int, width: int) -> None:
    images = images_of(3, height, width)
    made = CenterCrop(24)(images, torch.zeros(3, 0))
    assert torch.equal(made, TF.center_crop(images, [24, 24]))


@pytest.mark.parametrize("size", [16, 50, (20, 60)])
def test_resizing_is_torchvisions(size: int | tuple[int, int]) -> None:
    images = images_of(3)
    wanted = TF.resize(
        images.float(),
        [size] if isinstance(size, int) else list(size),
        InterpolationMode.BILINEAR,
        antialias=True,
    )
    augment = Resize(size)
    floats = augment(images.float(), torch.zeros(3, 0))
    torch.testing.assert_close(floats, wanted, rtol=0, atol=0.01)
    made = augment(images, torch.zeros(3, 0))
    assert made.dtype == torch.uint8
    assert (made - wanted).abs().max() <= 1


AUGMENTS: list[Augment] = [RandomResizedCrop(24), RandomCrop(24), CenterCrop(24), Resize(24)]


@pytest.mark.parametrize("augment", AUGMENTS, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_bits_do_not_depend_on_the_batch(augment: Augment, layout: torch.memory_format) -> None:
    images = images_of(14).contiguous(memory_format=layout)
    before, draws = images.clone(), draws_for(14, augment)
    together = augment(images, draws)
    assert torch.equal(images, before)
    for size in (1, 7):
        parts = zip(images.split(size), draws.split(size), strict=True)
        assert torch.equal(torch.cat([augment(i, d) for i, d in parts]), together)


@pytest.mark.parametrize("augment", [RandomCrop(32), CenterCrop(32)], ids=str)
def test_crops_larger_than_the_images_are_refused(augment: Augment) -> None:
    with pytest.raises(DataError, match=r"40x31 .* hold no square of 32 pixels: use Resize\(32\)"):
        augment(images_of(1), draws_for(1, augment))


def test_what_makes_no_sense() -> None:
    for make in (RandomResizedCrop, RandomCrop, CenterCrop, Resize):
        with pytest.raises(ValueError, match="at least 1"):
            make(0)
    with pytest.raises(ValueError, match="smaller, larger"):
        RandomResizedCrop(8, scale=(1.0, 0.5))
