"""Every recipe trains to its end in every way, and no step costs more than it may."""

from collections import Counter
from pathlib import Path

import pytest

from tests.pretend_gpu.host import Host
from tests.pretend_gpu.matrix import (
    DEVICES,
    PRECISIONS,
    RECIPES,
    USUAL,
    WAYS,
    WORST,
    Cell,
    budgets,
    covering,
    exceeded,
    measure,
)


@pytest.mark.pretend_gpu
@pytest.mark.parametrize("cell", covering(), ids=lambda cell: cell.name)
def test_it_trains_to_its_end(gpus: Host, cell: Cell, tmp_path: Path) -> None:
    found = measure(gpus, cell, tmp_path)
    assert found["launches"] > 0
    assert exceeded(cell, found) == []


def test_what_costs_more_than_it_may_is_named() -> None:
    cell = covering()[0]
    row = budgets()[cell.name]
    found = Counter({name: int(row[name]) for name in (*USUAL, *WORST)})
    assert exceeded(cell, found) == []
    found["syncs"] += 1
    assert exceeded(cell, found) == [f"{cell.name}: 1 syncs a step, at most 0"]


def test_no_cell_may_wait_in_a_step() -> None:
    for name, row in budgets().items():
        assert row["syncs"] == "0", name
        assert row["pageable"] == "0", name


def test_ci_runs_every_recipe_and_every_way() -> None:
    cells = covering()
    assert {cell.recipe for cell in cells} == set(RECIPES)
    assert {cell.way for cell in cells} == set(WAYS)
    assert {cell.precision for cell in cells} == set(PRECISIONS)
    assert {cell.devices for cell in cells} == set(DEVICES)
