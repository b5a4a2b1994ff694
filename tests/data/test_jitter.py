"""Against torchvision, sample by sample, on the factors that were drawn."""

from itertools import permutations

import pytest
import torch
from torch import Tensor
from torchvision.transforms import functional as TF

from paceline.data.jitter import ColorJitter, jitter
from paceline.errors import DataError

WILD = ColorJitter((0.2, 2.0), (0.0, 2.5), (0.0, 3.0))
MILD = ColorJitter(0.2, 0.2, 0.2)


def images_of(num: int, channels: int = 3, height: int = 9, width: int = 7) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.rand(num, channels, height, width, generator=generator)


def draws_for(num: int) -> Tensor:
    return torch.rand(num, 3, generator=torch.Generator().manual_seed(6))


def torchvisions(image: Tensor, factors: Tensor, order: tuple[int, ...] = (0, 1, 2)) -> Tensor:
    adjust = (TF.adjust_brightness, TF.adjust_contrast, TF.adjust_saturation)
    for number in order:
        image = adjust[number](image, float(factors[number]))
    return image


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augment", [WILD, MILD], ids=["wild", "mild"])
def test_each_sample_is_torchvisions(augment: ColorJitter, channels: int) -> None:
    images, factors = images_of(40, channels), augment.factors(draws_for(40))
    made = jitter(images, factors, white=1.0)
    wanted = torch.stack([torchvisions(images[n], factors[n]) for n in range(40)])
    torch.testing.assert_close(made, wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize("only", range(3), ids=["brightness", "contrast", "saturation"])
def test_each_change_alone(only: int) -> None:
    images = images_of(40)
    factors = torch.ones(40, 3)
    factors[:, only] = WILD.factors(draws_for(40))[:, only]
    wanted = torch.stack([torchvisions(images[n], factors[n], (only,)) for n in range(40)])
    torch.testing.assert_close(jitter(images, factors, white=1.0), wanted, rtol=0, atol=2e-6)
    assert (wanted - images).abs().max() > 0.1


def test_bytes_are_torchvisions_within_rounding() -> None:
    """torchvision rounds down after each of the three, which then are changed further."""
    images = (255 * images_of(40)).to(torch.uint8)
    factors = MILD.factors(draws_for(40))
    made = jitter(images, factors, white=255.0)
    wanted = torch.stack([torchvisions(images[n], factors[n]) for n in range(40)])
    assert made.dtype == torch.float32
    assert (made - wanted).min() > -0.5
    assert (made - wanted).max() < 3.5


def test_the_order_matters_only_where_values_are_cut_off() -> None:
    images = 0.3 + 0.3 * images_of(20)
    factors = MILD.factors(draws_for(20))
    made = jitter(images, factors, white=1.0)
    for order in permutations(range(3)):
        wanted = torch.stack([torchvisions(images[n], factors[n], order) for n in range(20)])
        torch.testing.assert_close(made, wanted, rtol=0, atol=2e-4)  # the weights sum to 0.9999


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("height", "width"), [(32, 32), (13, 11), (224, 224)])
def test_bits_do_not_depend_on_the_batch(
    height: int, width: int, layout: torch.memory_format
) -> None:
    images = images_of(14, 3, height, width).contiguous(memory_format=layout).mul_(255)
    before, draws = images.clone(), draws_for(14)
    together = WILD(images, draws)
    assert torch.equal(images, before)
    for size in (1, 7):
        parts = zip(images.split(size), draws.split(size), strict=True)
        assert torch.equal(torch.cat([WILD(i, d) for i, d in parts]), together)


def test_the_scale_is_the_datas() -> None:
    images, draws = images_of(10), draws_for(10)
    sixteenths = ColorJitter(0.5, 0.5, 0.5, white=16.0)(images * 16, draws)
    torch.testing.assert_close(sixteenths, 16 * ColorJitter(0.5, 0.5, 0.5, white=1)(images, draws))
    assert sixteenths.max() == 16


def test_factors_cover_their_ranges() -> None:
    factors = ColorJitter(0.2, 1.5, (0.5, 0.75)).factors(draws_for(20_000))
    for column, (low, high) in zip(factors.T, [(0.8, 1.2), (0, 2.5), (0.5, 0.75)], strict=True):
        assert low <= column.min() < low + 0.01
        assert high - 0.01 < column.max() <= high
        assert abs(column.mean() - (low + high) / 2) < 0.02


def test_describing() -> None:
    assert str(ColorJitter(0.2, 0, 0.5)) == "colour jitter (brightness 0.8 1.2, saturation 0.5 1.5)"


def test_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match=r"contrast \(2, 1\): give \(smaller, larger\)"):
        ColorJitter(contrast=(2, 1))
    with pytest.raises(ValueError, match="brightness -1"):
        ColorJitter(brightness=-1)
    with pytest.raises(DataError, match="1 or 3 channels, not 2"):
        MILD(torch.zeros(1, 2, 4, 4), torch.zeros(1, 3))
