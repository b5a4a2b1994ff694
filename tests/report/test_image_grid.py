import io

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from paceline.report.image_grid import Grid, Tile

Pixels = NDArray[np.uint8]


def tile(height: int, width: int, seed: int = 0, label: str = "cat") -> Tile:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Tile(pixels=pixels, label=label)


def drawn(grid: Grid, title: str = "title") -> Pixels:
    with Image.open(io.BytesIO(grid.draw(title))) as picture:
        assert picture.mode == "RGB"
        return np.array(picture)


@pytest.mark.parametrize(
    ("count", "columns", "rows"), [(1, 1, 1), (5, 3, 2), (9, 3, 3), (64, 8, 8)]
)
def test_every_pixel_is_in_its_place(count: int, columns: int, rows: int) -> None:
    grid = Grid([tile(8, 8, seed) for seed in range(count)])
    picture = drawn(grid)
    assert grid.columns == columns
    assert grid.factor == 12
    assert picture.shape == (*grid.size, 3)
    assert grid.size[0] // 96 >= rows
    for number, each in enumerate(grid.tiles):
        top, left = grid.place(number)
        found = picture[top : top + 96, left : left + 96]
        assert np.array_equal(found[::12, ::12], each.pixels)
        assert np.array_equal(found, each.pixels.repeat(12, 0).repeat(12, 1))


def test_images_of_different_sizes() -> None:
    grid = Grid([tile(100, 40, 1), tile(30, 120, 2), tile(1000, 500, 3)])
    assert grid.factor == 1
    assert grid.cell == (256, 128)
    picture = drawn(grid)
    for number in (0, 1):
        top, left = grid.place(number)
        pixels = grid.tiles[number].pixels
        found = picture[top : top + pixels.shape[0], left : left + pixels.shape[1]]
        assert np.array_equal(found, pixels)


def test_labels_stand_under_their_tiles_and_stay_in_their_column() -> None:
    white = np.full((8, 8, 3), 255, dtype=np.uint8)
    labels = ["", "cat", "W" * 60, "ten\nlines"]
    grid = Grid([Tile(pixels=white, label=label) for label in labels])
    picture = drawn(grid, title="")
    ink = []
    for number in range(4):
        top, left = grid.place(number)
        strip = picture[top + 96 : top + 96 + 20, left : left + 96]
        ink.append(int((strip < 200).any(axis=2).sum()))
        picture[top : top + 96 + 20, left - 2 : left + 96 + 2] = 255  # a letter may lean out
    assert ink[0] == 0
    assert 20 < ink[1] < ink[2]
    assert ink[3] > 20
    assert (picture == 255).all()


def test_the_title_is_drawn_and_cut_to_the_width() -> None:
    white = Tile(pixels=np.full((8, 8, 3), 255, dtype=np.uint8), label="")
    picture = drawn(Grid([white]), title="a very long title for a picture so small")
    assert (picture[:32] < 128).any()
    assert (picture[32:] == 255).all()
    assert (picture[:, -8:] == 255).all()


def test_the_same_tiles_give_the_same_bytes() -> None:
    grid = Grid([tile(8, 8), tile(8, 8, 1)])
    assert grid.draw("x") == grid.draw("x")
