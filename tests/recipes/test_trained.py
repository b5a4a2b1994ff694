"""Recipes with data files of their own reach a target on small ones in their real format."""

from pathlib import Path

import pytest

from tests.recipes.cases import Case, assert_reaches_its_target, assert_reaches_its_target_resumed
from tests.support.cifar_files import write_cifar10
from tests.support.idx_files import write_mnist
from tests.support.stl10_files import write_stl10
from tests.support.tiers import slow

pytestmark = pytest.mark.ranks

FASHION = Case(
    recipe="fashion-wideresnet",
    write=lambda root: write_mnist(root, 160, 60, classes=3, name="FashionMNIST"),
    arguments={"width": 1, "download": False},
    settings={"global_batch": 16, "lr": 0.05, "target_accuracy": 0.85},
)
CIFAR = Case(
    recipe="cifar10-wideresnet",
    write=lambda root: write_cifar10(root, train=160, test=60, classes=3).parent,
    arguments={"width": 1, "download": False},
    settings={"global_batch": 16, "target_accuracy": 0.8},
)
STL = Case(
    recipe="stl10-resnet18",
    write=lambda root: write_stl10(root, train=96, test=60, classes=3).parent,
    arguments={"size": 32, "download": False},
    settings={"global_batch": 16, "lr": 0.01, "target_accuracy": 0.8},
)
CASES = pytest.mark.parametrize(
    "case", [FASHION, slow(CIFAR), slow(STL)], ids=lambda case: case.recipe
)


@CASES
@pytest.mark.slow
def test_on_one_worker(case: Case, tmp_path: Path) -> None:
    assert_reaches_its_target(case, tmp_path)


@CASES
@pytest.mark.slow
def test_on_two_workers_resumed(case: Case, tmp_path: Path) -> None:
    assert_reaches_its_target_resumed(case, tmp_path)
