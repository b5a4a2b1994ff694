"""The decoders that are compared do the same work."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.decode import DECODERS, others, photograph, play, read, sources, write_folder
from paceline.data.crop import RandomResizedCrop

pytestmark = pytest.mark.filterwarnings("ignore:The image decoding and encoding capabilities")


def test_all_give_about_the_same_image() -> None:
    content = photograph(300, 400, 1)
    images = {name: decoder(content).numpy().astype(int) for name, decoder in DECODERS.items()}
    assert {image.shape for image in images.values()} == {(3, 256, 256)}
    for image in images.values():
        assert np.abs(image - images["Pillow"]).max() <= 1


def test_every_round_is_timed() -> None:
    rates = play([photograph(300, 300, 1)], rounds=2)
    assert [len(values) for values in rates.values()] == [2] * 4


def test_the_folder_is_read_whole_in_every_way(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, 4)
    ways = {**others(folder), **sources(tmp_path, (RandomResizedCrop(16),))}
    assert [way(0) for way in ways.values()] == [4] * 5
    assert [len(values) for values in read(ways, rounds=2).values()] == [2] * 5
