"""Against torchvision, sample by sample, on the parameters that were drawn."""

from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms import functional as TF

from paceline.data.affine import (
    AffineParameters,
    Geometric,
    Interpolation,
    RandomAffine,
    Warp,
    resample,
)
from paceline.data.augment import Augment, RandomFlip

SIZES = [(32, 32), (19, 26)]
RANGES: dict[str, dict[str, Any]] = {
    "rotation": {"degrees": 30},
    "translation": {"translate": (0.3, 0.2)},
    "scale": {"scale": (0.6, 1.7)},
    "shear": {"shear": 25},
    "both shears": {"shear": (-20.0, 35.0, 5.0, 30.0)},
    "flip": {"flip": 0.5},
    "all": {
        "degrees": (-40.0, 170.0),
        "translate": (0.2, 0.1),
        "scale": (0.8, 1.2),
        "shear": (-10.0, 10.0, -5.0, 15.0),
        "flip": 0.5,
    },
}
MODES: list[Interpolation] = ["nearest", "bilinear"]


def images_of(num: int, height: int, width: int, channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return 255 * torch.rand(num, channels, height, width, generator=generator)


def draws_for(num: int, count: int) -> Tensor:
    return torch.rand(num, count, generator=torch.Generator().manual_seed(4))


def torchvisions(
    image: Tensor | Image.Image,
    found: AffineParameters,
    n: int,
    mode: Interpolation,
    fill: list[float] | None = None,
) -> Tensor:
    """Flip, then affine, as torchvision does it to one image."""
    if found.flip[n] < 0:
        image = TF.hflip(image)
    made = TF.affine(
        image,
        angle=float(found.angle[n]),
        translate=[int(found.translate_x[n]), int(found.translate_y[n])],
        scale=float(found.scale[n]),
        shear=[float(found.shear_x[n]), float(found.shear_y[n])],
        interpolation=InterpolationMode(mode),
        fill=fill,
    )
    return made if isinstance(made, Tensor) else TF.pil_to_tensor(made)


def assert_same(left: Tensor, right: Tensor, mode: Interpolation) -> None:
    """Rounding may send a position halfway between two pixels to either: one in a thousand."""
    if mode == "nearest":
        assert ((left - right).abs() > 1e-4).float().mean() < 1e-3
    else:
        torch.testing.assert_close(left, right, rtol=0, atol=0.01)  # of 255


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("height", "width"), SIZES)
@pytest.mark.parametrize("ranges", RANGES.values(), ids=RANGES)
def test_each_sample_is_torchvisions(
    ranges: dict[str, Any], height: int, width: int, mode: Interpolation
) -> None:
    affine = RandomAffine(**ranges)
    images, draws = images_of(20, height, width), draws_for(20, 7)
    found = affine.parameters(draws, height, width)
    made = Warp(affine, interpolation=mode)(images, draws)
    wanted = torch.stack([torchvisions(images[n], found, n, mode) for n in range(20)])
    assert_same(made, wanted, mode)
    assert not torch.equal(made, images)


@pytest.mark.parametrize("fill", [100.0, 255.0])
def test_what_comes_in_is_the_fill(fill: float) -> None:
    affine = RandomAffine(**RANGES["all"])
    images, draws = images_of(20, 32, 32), draws_for(20, 7)
    found = affine.parameters(draws, 32, 32)
    nearest, bilinear = (
        Warp(affine, interpolation=mode, fill=fill)(images, draws) for mode in MODES
    )
    for n in range(20):
        assert_same(nearest[n], torchvisions(images[n], found, n, "nearest", [fill] * 3), "nearest")
        # torchvision weights the pixels at the edge twice where bilinear meets a fill: not so here.
        wanted = torchvisions(images[n] - fill, found, n, "bilinear") + fill
        assert_same(bilinear[n], wanted, "bilinear")


@pytest.mark.parametrize("mode", MODES)
def test_bytes_are_torchvisions_within_rounding(mode: Interpolation) -> None:
    affine = RandomAffine(**RANGES["all"])
    images, draws = images_of(30, 32, 32).to(torch.uint8), draws_for(30, 7)
    found = affine.parameters(draws, 32, 32)
    made = Warp(affine, interpolation=mode)(images, draws).round()
    wanted = torch.stack([torchvisions(images[n], found, n, mode) for n in range(30)])
    assert made.dtype == torch.float32
    off = (made - wanted.float()).abs()
    assert (off.max() <= 1) if mode == "bilinear" else ((off > 0).float().mean() < 1e-3)


def test_pil_images_give_the_same() -> None:
    affine = RandomAffine(**RANGES["all"])
    images, draws = images_of(20, 32, 32).to(torch.uint8), draws_for(20, 7)
    found = affine.parameters(draws, 32, 32)
    wanted = [torchvisions(TF.to_pil_image(images[n]), found, n, "nearest") for n in range(20)]
    assert_same(affine(images, draws), torch.stack(wanted).float(), "nearest")


def test_rotation_is_torchvisions_rotate_the_other_way_round() -> None:
    images, draws = images_of(10, 32, 32), draws_for(10, 7)
    affine = RandomAffine(10)
    angles = affine.parameters(draws, 32, 32).angle
    made = Warp(affine, interpolation="bilinear")(images, draws)
    for n in range(10):
        turned = TF.rotate(images[n], -float(angles[n]), InterpolationMode.BILINEAR)
        torch.testing.assert_close(made[n], turned, rtol=0, atol=0.01)


def test_composed_maps_are_the_maps_one_after_the_other() -> None:
    """On an image whose values are positions, bilinear sampling is exact inside: so is the sum."""
    height, width = 64, 64
    across = torch.arange(width, dtype=torch.float32).expand(height, width)
    images = torch.stack((across, across.T)).expand(12, 2, height, width)
    affines = (RandomAffine(10), RandomAffine(shear=10, scale=(0.8, 1.2)))
    changes: tuple[Geometric, ...] = (RandomFlip(), *affines)
    counts = [change.num_draws for change in changes]
    draws = draws_for(12, sum(counts))
    together = Warp(*changes, interpolation="bilinear")(images, draws)
    one_by_one = images
    for change, table in zip(changes, draws.split(counts, dim=1), strict=True):
        one_by_one = Warp(change, interpolation="bilinear")(one_by_one, table)
    inside = (slice(None), slice(None), slice(24, 40), slice(24, 40))
    torch.testing.assert_close(together[inside], one_by_one[inside], rtol=0, atol=1e-3)
    swapped = Warp(*reversed(changes), interpolation="bilinear")(images, draws.flip(1))
    assert (swapped[inside] - together[inside]).abs().max() > 1


def test_one_resampling_is_sharper_than_two() -> None:
    images, draws = images_of(50, 32, 32), draws_for(50, 14)
    first, then = RandomAffine(10), RandomAffine(shear=10)
    once = Warp(first, then, interpolation="bilinear")(images, draws)
    twice = Warp(first, interpolation="bilinear")(images, draws[:, :7])
    twice = Warp(then, interpolation="bilinear")(twice, draws[:, 7:])
    assert once[:, :, 8:24, 8:24].var() > 1.1 * twice[:, :, 8:24, 8:24].var()


def test_a_warp_of_a_flip_is_the_flip() -> None:
    images, draws = images_of(40, 9, 7), draws_for(40, 1)
    assert torch.equal(Warp(RandomFlip())(images, draws), RandomFlip()(images, draws))


AUGMENTS: list[Augment] = [
    RandomAffine(**RANGES["all"]),
    Warp(RandomFlip(), RandomAffine(10), RandomAffine(shear=10, scale=(0.8, 1.2))),
    Warp(RandomAffine(**RANGES["all"]), interpolation="bilinear", fill=3.0),
]


@pytest.mark.parametrize("augment", AUGMENTS, ids=str)
@pytest.mark.parametrize(("height", "width"), [(32, 32), (13, 11)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_bits_do_not_depend_on_the_batch(
    augment: Augment, height: int, width: int, layout: torch.memory_format
) -> None:
    images = images_of(49, height, width).to(torch.uint8).contiguous(memory_format=layout)
    before, draws = images.clone(), draws_for(49, augment.num_draws)
    together = augment(images, draws)
    assert torch.equal(images, before)
    assert together.shape == images.shape
    for size in (1, 7):
        parts = zip(images.split(size), draws.split(size), strict=True)
        assert torch.equal(torch.cat([augment(i, d) for i, d in parts]), together)


def test_parameters_cover_their_ranges_evenly() -> None:
    affine = RandomAffine(
        (10.0, 20.0), translate=(0.5, 0.25), scale=(2.0, 3.0), shear=(1.0, 2.0, 3.0, 4.0), flip=0.25
    )
    found = affine.parameters(draws_for(20_000, 7), height=8, width=20)
    for values, low, high in [
        (found.angle, 10, 20),
        (found.scale, 2, 3),
        (found.shear_x, 1, 2),
        (found.shear_y, 3, 4),
    ]:
        assert low <= values.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < values.max() < high
        assert abs(values.mean() - (low + high) / 2) < 0.02 * (high - low)
    assert found.translate_x.unique().tolist() == list(range(-10, 11))
    assert found.translate_y.unique().tolist() == [-2, -1, 0, 1, 2]
    assert 0.24 < (found.flip < 0).float().mean() < 0.26


def test_no_change_is_none() -> None:
    images = images_of(5, 32, 32)
    identity = torch.eye(2, 3, dtype=torch.float64).expand(5, 2, 3)
    assert torch.equal(resample(images, identity), images)
    assert torch.equal(RandomAffine()(images, draws_for(5, 7)), images)
    torch.testing.assert_close(
        resample(images, identity, interpolation="bilinear"), images, rtol=0, atol=0.01
    )


def test_describing() -> None:
    warp = Warp(RandomFlip(), RandomAffine(10, scale=(0.8, 1.2)), interpolation="bilinear")
    assert str(warp) == "warp (random flip, affine (degrees -10 10, scale 0.8 1.2); bilinear)"


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"degrees": (5.0, -5.0)}, "smaller, larger"),
        ({"scale": (0.0, 1.0)}, "more than 0"),
        ({"translate": (1.5, 0.0)}, "from 0 to 1"),
        ({"flip": -0.1}, "from 0 to 1"),
        ({"shear": 90.0}, "less than 90"),
    ],
)
def test_ranges_that_make_no_sense(ranges: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RandomAffine(**ranges)


def test_a_warp_needs_changes_and_a_known_interpolation() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Warp()
    with pytest.raises(ValueError, match="use 'nearest' or 'bilinear'"):
        Warp(RandomFlip(), interpolation="bicubic")  # type: ignore[arg-type]
