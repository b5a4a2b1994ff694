import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from paceline.data.augment import Augment, RandomFlip, RandomShift, Resize, uniforms
from paceline.data.splitmix import GOLDEN, MASK, Domain, derive_key, mix64

AUGMENTS: list[Augment] = [RandomShift(1), RandomShift(3), RandomFlip()]


def raw_images(num: int, channels: int = 2, height: int = 6, width: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (num, channels, height, width)
    return torch.randint(1, 17, shape, dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("augment", AUGMENTS, ids=str)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_each_sample_depends_on_its_own_draws_only(
    augment: Augment, layout: torch.memory_format
) -> None:
    images = raw_images(40)
    draws = torch.rand(40, augment.num_draws)
    before = images.clone()
    together = augment(images.contiguous(memory_format=layout), draws)
    assert torch.equal(images, before)
    assert together.shape == images.shape
    assert together.dtype == torch.uint8
    for n in range(40):
        assert torch.equal(together[n : n + 1], augment(images[n : n + 1], draws[n : n + 1]))


@pytest.mark.parametrize("augment", [*AUGMENTS, Resize((4, 4))], ids=str)
def test_nothing_is_read_from_the_device(augment: Augment) -> None:
    """On the meta device there is nothing to read, and tensors elsewhere can't be mixed in."""
    images = raw_images(8, channels=3)
    draws = torch.rand(8, augment.num_draws)
    real, unreal = augment(images, draws), augment(images.to("meta"), draws.to("meta"))
    assert unreal.device.type == "meta"
    assert (unreal.shape, unreal.dtype) == (real.shape, real.dtype)


def test_shift_by_hand() -> None:
    image = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3)
    shift = RandomShift(1)
    unmoved = shift(image, torch.tensor([[0.5, 0.5]]))
    up_left = shift(image, torch.tensor([[0.99, 0.99]]))
    down = shift(image, torch.tensor([[0.0, 0.5]]))
    assert torch.equal(unmoved, image)
    assert up_left.flatten().tolist() == [5, 6, 0, 8, 9, 0, 0, 0, 0]
    assert down.flatten().tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6]


def test_every_offset_is_equally_likely() -> None:
    image = torch.zeros(9000, 1, 5, 5, dtype=torch.uint8)
    image[:, 0, 2, 2] = 1
    draws = torch.rand(9000, 2, generator=torch.Generator().manual_seed(1))
    counts = RandomShift(1)(image, draws).sum(dim=0)[0]
    assert counts.sum() == 9000
    assert ((counts[1:4, 1:4] - 1000.0) ** 2 / 1000).sum() < 26.1  # chi-square, 8 degrees, 0.001


def test_flip_by_hand() -> None:
    images = torch.tensor([[[[1, 2, 3]]], [[[1, 2, 3]]]], dtype=torch.uint8)
    flipped = RandomFlip()(images, torch.tensor([[0.2], [0.7]]))
    assert flipped[:, 0, 0].tolist() == [[3, 2, 1], [1, 2, 3]]


SIZES = [(96, 96, 224), (96, 96, 40), (37, 53, 64), (64, 64, 64)]


@pytest.mark.parametrize(("height", "width", "size"), SIZES)
def test_a_resize_equals_torchvisions_on_pillow_images(height: int, width: int, size: int) -> None:
    images = raw_images(3, 3, height, width) * 15
    resized = Resize((size, size))(images, torch.empty(3, 0))
    for image, found in zip(images, resized, strict=True):
        pillow = v2.Resize((size, size))(Image.fromarray(image.permute(1, 2, 0).numpy()))
        wanted = np.asarray(pillow).transpose(2, 0, 1).astype(int)
        assert np.abs(found.numpy().astype(int) - wanted).max() <= 1


def test_a_resize_needs_pixels() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Resize((3, 0))


def test_a_shift_needs_pixels() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        RandomShift(0)


def reference(seed: int, epoch: int, index: int, stream: int, count: int) -> list[float]:
    key = derive_key(Domain.AUGMENTATION, seed, epoch, stream)
    sample = mix64((index * GOLDEN + key) & MASK)
    return [(mix64((sample + n * GOLDEN) & MASK) >> 40) * 2.0**-24 for n in range(1, count + 1)]


def test_equal_to_python_integers() -> None:
    indices = torch.tensor([0, 1, 5, 2**40])
    drawn = uniforms(3, 2, indices, stream=1, count=3)
    assert drawn.dtype == torch.float32
    assert drawn.tolist() == [reference(3, 2, int(i), 1, 3) for i in indices]


def test_keyed_by_sample_not_by_position() -> None:
    indices = torch.randperm(50)
    everything = uniforms(1, 1, torch.arange(50), stream=0, count=2)
    assert torch.equal(uniforms(1, 1, indices, stream=0, count=2), everything[indices])


def test_seed_epoch_and_stream_change_the_numbers() -> None:
    indices = torch.arange(20)
    drawn = [
        uniforms(seed, epoch, indices, stream, 1)
        for seed, epoch, stream in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    ]
    for left in range(4):
        for right in range(left):
            assert not torch.equal(drawn[left], drawn[right])


def test_uniform() -> None:
    drawn = uniforms(0, 0, torch.arange(20_000), stream=0, count=2)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = torch.histc(drawn, bins=16, min=0, max=1)
    assert ((counts - 2500) ** 2 / 2500).sum() < 37.7  # chi-square, 15 degrees, p = 0.001
    assert abs(torch.corrcoef(drawn.T)[0, 1]) < 0.025
