from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.data.augment import Augment, RandomFlip, RandomShift, uniforms
from paceline.data.memory import TensorData, synthetic_images
from paceline.data.order import epoch_order
from paceline.errors import DataError
from paceline.report.preview import evaluation_tiles, to_pixels, training_tiles
from paceline.training.job import ImageSet, Job

SEED = 11


def job_of(data: ImageSet, **more: object) -> Job:
    return Job(model=nn.Identity(), train=data, validation=data, **more)  # type: ignore[arg-type]


def colours(image: Tensor) -> np.ndarray:
    return image.permute(1, 2, 0).numpy()


@pytest.mark.parametrize("count", [7, 30, 99])
def test_tiles_of_the_test_set_are_its_images(count: int) -> None:
    data = synthetic_images(30, 3, 6, 5, 10, seed=1)
    tiles = evaluation_tiles(job_of(data, augment=(RandomFlip(),)), count)
    shown = [number * 30 // min(count, 30) for number in range(min(count, 30))]
    assert len(tiles) == len(shown) == len(set(shown))
    for tile, index in zip(tiles, shown, strict=True):
        assert np.array_equal(tile.pixels, colours(data.images[index]))
        assert tile.label == data.class_names[data.labels[index]]


def test_tiles_of_training_are_the_first_samples_as_training_changes_them() -> None:
    data = synthetic_images(30, 3, 6, 6, 10, seed=1)
    tiles = training_tiles(job_of(data, augment=(RandomFlip(), RandomShift(2))), SEED, 8)
    order = torch.from_numpy(epoch_order(30, SEED, 0))[:8]
    images = data.images[order]
    changes: list[Augment] = [RandomFlip(), RandomShift(2)]
    for stream, augment in enumerate(changes):
        images = augment(images, uniforms(SEED, 0, order, stream, augment.num_draws))
    for tile, image, index in zip(tiles, images, order, strict=True):
        assert np.array_equal(tile.pixels, colours(image))
        assert tile.label == data.class_names[data.labels[index]]
    assert not all(
        np.array_equal(tile.pixels, colours(data.images[i]))
        for tile, i in zip(tiles, order, strict=True)
    )


def test_values_follow_the_scale_of_the_data() -> None:
    data = synthetic_images(4, 1, 3, 3, 2, seed=1)
    sixteenths = replace(data, images=data.images % 17, scale=16.0)
    for tile, image in zip(evaluation_tiles(job_of(sixteenths), 4), sixteenths.images, strict=True):
        wanted = (image[0].double() * 255 / 16).round()
        assert tile.pixels.shape == (3, 3, 3)
        assert all(np.array_equal(tile.pixels[..., c], wanted) for c in range(3))


class Painted:
    """Map-style: PIL images, with a random choice of the kind that data sets make."""

    classes = ("dark", "light")

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        shade = int(torch.randint(10, (1,))) + 20 * index
        return Image.new("L", (4, 3), shade), index % 2


def test_map_style_data_is_read_as_training_reads_it() -> None:
    first, again = (training_tiles(job_of(Painted()), SEED, 6) for _ in range(2))
    other = training_tiles(job_of(Painted()), SEED + 1, 6)
    order = epoch_order(10, SEED, 0)[:6]
    for tile, same, index in zip(first, again, order, strict=True):
        assert np.array_equal(tile.pixels, same.pixels)
        assert tile.pixels.shape == (3, 4, 3)
        assert tile.pixels[0, 0, 0] // 20 == index
        assert tile.label == Painted.classes[index % 2]
    assert [t.pixels.max() for t in first] != [t.pixels.max() for t in other]
    assert [t.label for t in evaluation_tiles(job_of(Painted()), 10)] == ["dark", "light"] * 5


def test_labels_without_names_are_numbers() -> None:
    data = TensorDataset(torch.rand(3, 1, 4, 4), torch.tensor([7, 8, 9]))
    assert [t.label for t in evaluation_tiles(job_of(data), 3)] == ["7", "8", "9"]


GREY = torch.tensor([[0.0, 0.5], [1.0, 0.25]])


@pytest.mark.parametrize(
    ("image", "red"),
    [
        (GREY, [[0, 128], [255, 64]]),
        (GREY[None], [[0, 128], [255, 64]]),
        (GREY.numpy(), [[0, 128], [255, 64]]),
        (GREY.expand(4, 2, 2), [[0, 128], [255, 64]]),
        ((GREY[None] * 255).to(torch.uint8), [[0, 127], [255, 63]]),
        ((GREY - 0.5) / 0.25, [[0, 128], [255, 64]]),
        (torch.full((1, 2, 2), 3.0), [[0, 0], [0, 0]]),
        (Image.new("L", (2, 2), 7), [[7, 7], [7, 7]]),
    ],
    ids=["plane", "grey", "array", "four channels", "bytes", "normalised", "flat", "pil"],
)
def test_pixels(image: object, red: list[list[int]]) -> None:
    pixels = to_pixels(image)
    assert pixels.dtype == np.uint8
    assert pixels[..., 0].tolist() == red


def points() -> ImageSet:
    return TensorDataset(torch.rand(5, 2), torch.zeros(5))


def triples() -> ImageSet:
    return TensorDataset(torch.rand(5, 1, 2, 2), torch.zeros(5), torch.zeros(5))


def nothing() -> TensorData:
    data = synthetic_images(1, 1, 4, 4, 10, seed=1)
    return replace(data, images=data.images[:0], labels=data.labels[:0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (points, r"Tensor of shape \(2,\), which can't be shown as an image"),
        (triples, r"needs pairs \(image, label\)"),
        (nothing, "no samples"),
    ],
)
def test_what_is_no_image_is_named(make: Callable[[], ImageSet], message: str) -> None:
    with pytest.raises(DataError, match=message):
        training_tiles(job_of(make()), SEED, 4)
    with pytest.raises(DataError, match=message):
        evaluation_tiles(job_of(make()), 4)
