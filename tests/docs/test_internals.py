"""The walks of docs/internals: the diff of each fits the source of today and does what is said."""

import json
import re
import tarfile
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from paceline.data.imagefolder import load_image_folder
from paceline.data.protocols import Fingerprinted, Labelled, RawImages
from paceline.errors import DataError
from tests.docs.pages import ROOT, blocks
from tests.docs.running import train_here
from tests.support.image_files import write_image_folder
from tests.training.snapshots.test_golden import GOLDEN

WALKS = ROOT / "docs" / "internals"


def patched(source: str, diff: str) -> str:
    """Apply a diff of one place, as a page shows it: lines with a space, + or - before them."""
    lines = diff.splitlines()
    before = "\n".join(line[1:] for line in lines if line[:1] in (" ", "-"))
    after = "\n".join(line[1:] for line in lines if line[:1] in (" ", "+"))
    assert source.count(before) == 1, f"the page's diff doesn't fit: {before}"
    return source.replace(before, after)


def test_a_field_of_snapshots_needs_one_place() -> None:
    (block,) = blocks(WALKS / "add-a-snapshot-field.md", "diff")
    source = (ROOT / "src/paceline/training/snapshots/train_state.py").read_text()
    module: dict[str, object] = {"__name__": "patched"}
    exec(compile(patched(source, block.text), "train_state.py", "exec"), module)
    state = module["TrainState"]
    (earlier,) = GOLDEN.glob("with-rows/step-*/state.json")
    position = json.loads(earlier.read_text())["position"]
    loaded = state.from_json(position)  # type: ignore[attr-defined]
    assert loaded.to_json().items() >= position.items()
    assert loaded.skipped_steps == 0
    loaded.skipped_steps = 3
    assert state.from_json(loaded.to_json()).skipped_steps == 3  # type: ignore[attr-defined]


def test_the_layers_are_those_that_the_check_holds() -> None:
    """The drawing reads up from the ground, the linter's contract down from the roof."""
    page = (ROOT / "docs" / "design.md").read_text()
    drawing = page.partition("## Layers\n")[2].partition("\nEach may import")[0]
    drawn = [set(re.findall(r"\w+", layer)) for layer in drawing.split("<")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    contracts = project["tool"]["importlinter"]["contracts"]
    (layers,) = (each["layers"] for each in contracts if each["type"] == "layers")
    held = [set(re.findall(r"paceline\.(\w+)", layer)) for layer in reversed(layers)]
    assert drawn == held
    packages = {path.parent.name for path in (ROOT / "src/paceline").glob("*/__init__.py")}
    assert set().union(*held) == packages | {"errors", "files"}


FORMAT = blocks(WALKS / "add-a-data-format.md", "python")[0].text
SIZE = 32


def write_tars(photos: Path, tars: Path) -> None:
    """Put each class of each split into a tar file."""
    for folder in photos.glob("*/*"):
        (tars / folder.parent.name).mkdir(parents=True, exist_ok=True)
        with tarfile.open(tars / folder.parent.name / f"{folder.name}.tar", "w") as tar:
            tar.add(folder, folder.name)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    write_tars(write_image_folder(tmp_path / "photos"), tmp_path / "tars")
    return tmp_path / "photos"


def tar_images(folder: Path, *more: object) -> RawImages:
    module: dict[str, object] = {"__name__": "tars"}
    exec(compile(FORMAT, "tars.py", "exec"), module)
    make: Callable[..., RawImages] = module["TarImages"]  # type: ignore[assignment]
    return make(folder, SIZE, *more)


@pytest.mark.parametrize("split", ["train", "val"])
def test_the_data_format_gives_what_the_folder_does(split: str, photos: Path) -> None:
    expected = load_image_folder(photos, SIZE, jobs=1)[split]
    found = tar_images(photos.parent / "tars" / split)
    assert isinstance(found, RawImages)
    assert isinstance(found, Labelled)
    assert isinstance(found, Fingerprinted)
    assert found.class_names == expected.class_names
    assert (found.mean, found.std, found.scale) == (expected.mean, expected.std, expected.scale)
    assert len(found) == len(expected)  # type: ignore[arg-type]
    for index in range(len(expected)):
        image, label = found[index]  # type: ignore[index]
        assert torch.equal(image, expected[index][0])
        assert label == expected[index][1]


def test_the_data_format_names_what_is_wrong(photos: Path) -> None:
    train = photos.parent / "tars" / "train"
    whole = tar_images(train)
    assert isinstance(whole, Fingerprinted)
    with pytest.raises(DataError, match=r"holds ant, bee, cat; expected are ant, bee$"):
        tar_images(train, ("ant", "bee"))
    with pytest.raises(DataError, match="holds no tar files with images"):
        tar_images(photos)
    (train / "cat.tar").unlink()
    fewer = tar_images(train)
    assert isinstance(fewer, Fingerprinted)
    assert fewer.fingerprint() != whole.fingerprint()
    (train / "dog.tar").write_bytes(b"none")
    with pytest.raises(DataError, match=r"dog.tar: no uncompressed tar file"):
        tar_images(train)


@pytest.mark.slow
def test_the_data_format_trains(photos: Path) -> None:
    (photos.parent / "tars.py").write_text(FORMAT)
    printed = train_here(photos.parent, "tars.py:build", "--workers", "2", "--run-dir", "run")
    assert "TarImages: 24 samples" in printed
