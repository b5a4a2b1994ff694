import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.cli.app import main
from paceline.data.digits import load_digits
from paceline.errors import ExitCode
from paceline.report.image_grid import Grid
from paceline.report.preview import evaluation_tiles, training_tiles
from paceline.training.recipe import load_recipe


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    sys.modules.pop("taken", None)


def pixels(path: str) -> np.ndarray:
    with Image.open(path) as picture:
        return np.asarray(picture)


def test_two_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main("preview digits --shift 2 --tiles 9 --seed 5 --out a.png".split()) == ExitCode.DONE
    assert {path.name for path in tmp_path.iterdir()} == {"a-train.png", "a-test.png"}
    shown = capsys.readouterr().out
    assert "9 samples  a-train.png" in shown
    job = load_recipe("paceline.recipes.digits:digits")(shift=2)
    for part, tiles in (("train", training_tiles(job, 5, 9)), ("test", evaluation_tiles(job, 9))):
        grid, picture = Grid(tiles), pixels(f"a-{part}.png")
        for number, tile in enumerate(tiles):
            top, left = grid.place(number)
            found = picture[top : top + grid.cell[0], left : left + 8 * grid.factor]
            assert np.array_equal(found[:: grid.factor, :: grid.factor], tile.pixels)


def test_the_digits_by_default_and_the_test_set_unchanged() -> None:
    assert main(["preview"]) == ExitCode.DONE
    picture, test = pixels("preview-test.png"), load_digits()[1]
    top, left = 32, 8  # the first tile: 8x8 pixels, enlarged 12 times
    wanted = (test.images[0, 0].double() * 255 / test.scale).round().numpy()
    assert np.array_equal(picture[top : top + 96 : 12, left : left + 96 : 12, 0], wanted)
    assert picture.shape[:2] == (32 + 8 * (96 + 20 + 8), 8 + 8 * (96 + 8))


def test_files_are_replaced_only_on_demand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "preview-test.png").write_text("mine")
    assert main(["preview", "digits"]) == ExitCode.USAGE
    assert "preview-test.png exists already; --overwrite replaces it" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["preview-test.png"]
    assert main(["preview", "digits", "--overwrite"]) == ExitCode.DONE
    assert (tmp_path / "preview-test.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("preview digit", "unknown recipe 'digit'"),
        ("preview digits --tile 3", "Did you mean '--tiles'"),
        ("preview digits --tiles 0", "--tiles should be 1 to 1024, not 0"),
        ("preview digits --out x.jpg", "let it end in .png"),
        ("preview digits --out no/x.png", "there is no directory no"),
        ("preview digits --lr 0.1", "unknown option '--lr'"),
        ("preview taken.py:build", "its argument 'tiles' is an option of `paceline preview`"),
    ],
)
def test_wrong_usage(
    line: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken.py").write_text("def build(*, tiles: int = 3) -> None: ...\n")
    assert main(line.split()) == ExitCode.USAGE
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*.png"))
