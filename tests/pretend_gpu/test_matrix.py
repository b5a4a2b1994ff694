"""Every recipe comes to its end in every way of training it."""

from pathlib import Path

import pytest

from tests.pretend_gpu.host import Host
from tests.pretend_gpu.matrix import DEVICES, PRECISIONS, RECIPES, WAYS, Cell, covering, measure

FROM_FILES = "imagefolder-vgg19"


@pytest.mark.pretend_gpu
@pytest.mark.parametrize("cell", covering(), ids=lambda cell: cell.name)
def test_it_trains_to_its_end(gpus: Host, cell: Cell, tmp_path: Path) -> None:
    found = measure(gpus, cell, tmp_path)
    assert found["launches"] > 0
    # What is in memory is on the device from the beginning.
    assert found["h2d"] == 0 or cell.recipe == FROM_FILES


def test_ci_runs_every_recipe_and_every_way() -> None:
    cells = covering()
    assert {cell.recipe for cell in cells} == set(RECIPES)
    assert {cell.way for cell in cells} == set(WAYS)
    assert {cell.precision for cell in cells} == set(PRECISIONS)
    assert {cell.devices for cell in cells} == set(DEVICES)
