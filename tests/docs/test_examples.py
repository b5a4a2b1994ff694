"""The examples run, and each is a small step from the last."""

import difflib
import json
import os
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.running import run_in, train_here

EXAMPLES = ROOT / "examples"
SHORT = ("--samples", "300", "--epochs", "1", "--run-dir", "run")


@pytest.mark.slow
def test_01_recipe(tmp_path: Path) -> None:
    printed = train_here(tmp_path, f"{EXAMPLES / '01_recipe.py'}:build", *SHORT)
    assert "bars: 300 images" in printed


@pytest.mark.slow
def test_02_own_dataset(tmp_path: Path) -> None:
    recipe = f"{EXAMPLES / '02_own_dataset.py'}:build"
    printed = train_here(tmp_path, recipe, *SHORT, "--loader-workers", "1")
    assert "Bars: 300 samples" in printed


@pytest.mark.ranks
@pytest.mark.slow
def test_03_torchrun(tmp_path: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = str(EXAMPLES / "03_torchrun.sh")
    run_in(tmp_path, ["bash", script, *SHORT, "--loader-workers", "0"], path)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["world_size"] == 2


def test_each_is_a_small_step() -> None:
    first, second = (
        (EXAMPLES / n).read_text().splitlines() for n in ("01_recipe.py", "02_own_dataset.py")
    )
    changed = [line for line in difflib.unified_diff(first, second, n=0) if line[:1] in "+-"]
    assert len(changed) < len(first) + len(second) - 40
