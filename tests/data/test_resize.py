import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from paceline.data.crop import center_crop, resize, shorter_side_to

SIZES = [(96, 96, 224), (96, 96, 40), (37, 53, 64), (100, 75, 33), (64, 64, 64)]


def pictures(height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (3, 3, height, width), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("height", "width", "size"), SIZES)
def test_equals_torchvision_on_pillow_images(height: int, width: int, size: int) -> None:
    images = pictures(height, width)
    ours = resize(images, shorter_side_to(height, width, size))
    transform = v2.Resize(size, interpolation=v2.InterpolationMode.BILINEAR)
    for image, found in zip(images, ours, strict=True):
        pillow = transform(Image.fromarray(image.permute(1, 2, 0).numpy()))
        wanted = np.asarray(pillow).transpose(2, 0, 1).astype(int)
        assert found.shape == wanted.shape
        assert np.abs(found.numpy().astype(int) - wanted).max() <= 1


@pytest.mark.parametrize(("height", "width", "size"), SIZES)
def test_float_devices_give_the_same(height: int, width: int, size: int) -> None:
    images = pictures(height, width)
    exact = torch.nn.functional.interpolate(
        images.float(), size=(size, size), mode="bilinear", antialias=True
    )
    assert (resize(images, size).float() - exact.round()).abs().max() <= 1


def test_nothing_to_do_copies_nothing() -> None:
    images = pictures(20, 30)
    assert resize(images, (20, 30)) is images


@pytest.mark.parametrize(
    ("height", "width", "size"), [(9, 12, 9), (10, 13, 8), (11, 11, 8), (8, 15, 5)]
)
def test_the_middle_is_torchvisions(height: int, width: int, size: int) -> None:
    images = pictures(height, width)
    assert torch.equal(center_crop(images, size), v2.CenterCrop(size)(images))
