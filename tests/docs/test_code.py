"""The Python of every page runs as its reader would run it."""

import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.docs.pages import COMING_FROM, PAGES, ROOT, blocks
from tests.support.image_files import write_image_folder
from tests.support.warm import run_warm

INTERNALS = ROOT / "docs" / "internals"
PYTHON = {
    f"{page.stem} {number}": block
    for page in PAGES
    if page.parent != COMING_FROM  # test_coming_from.py has those
    for number, block in enumerate(blocks(page, "python"), 1)
}

TRAINED = """
import paceline
from torch import nn
s = paceline.session()
model = s.model(nn.Linear(4, 1))
optimizer = s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
data = torch.utils.data.TensorDataset(torch.ones(8, 4), torch.ones(8))
batches = s.loader(data, global_batch=4)
for epoch in s.epochs(2):
    for x, y in batches:
"""


@dataclass(frozen=True)
class Use:
    """How a block is used: what stands after it in the file, and the commands."""

    commands: Sequence[str] = ("python {file}",)
    after: str = ""


SCRIPT = ("python {file}", "paceline run {file} --workers 2")
RECIPE = ("paceline train {file}:build --epochs 1 --workers 2",)
USES: Mapping[str, Use] = {
    "add-a-data-format 1": Use(RECIPE),
    "augmentation 1": Use(),
    "augmentation 2": Use(),
    "data 1": Use(),
    "first-training 1": Use(RECIPE),
    "image-folders 1": Use(after="build(Path('photos'))"),
    "own-loop 1": Use(SCRIPT),
    "run-directory 1": Use(
        (
            "paceline train digits --epochs 1 --run-dir run",
            "paceline export run all.safetensors --snapshot last",
            "python {file}",
        ),
        after="import json\nfound = json.load(open('run/summary.json'))['weights_sha256']\n"
        "assert weights_sha256('all.safetensors') == found",
    ),
    "session 1": Use(
        after=f"import torch\n{TRAINED}"
        "        discriminate(s, model(x).mean(), -model(x).square().mean(), optimizer)",
    ),
    "session 2": Use(
        after=f"import torch\n{TRAINED}        step(s, model, (model(x)[:, 0] - y).square().mean())"
    ),
    "verify 1": Use(
        after="os.environ |= {'RANK': '0', 'LOCAL_RANK': '0'}\nstart(print, 'trains')\n"
    ),
    "write-a-recipe 1": Use((*RECIPE, "paceline train {file}:build --help")),
    "write-a-recipe 2": Use(
        after="images = torch.full((2, 1, 2, 2), 200, dtype=torch.uint8)\n"
        "found = RandomInvert()(images, torch.tensor([[0.4], [0.6]]))[:, 0, 0, 0]\n"
        "assert found.tolist() == [55, 200]"
    ),
}
"""By page and number of the block."""


def test_every_block_is_used() -> None:
    elsewhere = {"add-a-gradient-sync 1", "add-a-gradient-sync 2"}  # below: a package's files
    assert USES.keys() | elsewhere == PYTHON.keys()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.parametrize("name", USES)
def test_python_runs(name: str, tmp_path: Path) -> None:
    use = USES[name]
    file = tmp_path / "page.py"
    file.write_text(f"{PYTHON[name].text}\n{use.after}")
    write_image_folder(tmp_path / "photos")
    for folder in (tmp_path / "photos").glob("*/*"):
        (tmp_path / "tars" / folder.parent.name).mkdir(parents=True, exist_ok=True)
        with tarfile.open(f"{tmp_path}/tars/{folder.parent.name}/{folder.name}.tar", "w") as tar:
            tar.add(folder, folder.name)
    for command in use.commands:
        program, *words = command.format(file="page.py").split()
        module = ["-m", "paceline"] if program == "paceline" else []
        done = run_warm([sys.executable, *module, *words], tmp_path, PACELINE_DEVICE="cpu")
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("page", "plugin"), [("add-a-launcher", "launch"), ("add-a-sink", "tracking")]
)
def test_the_package_of_a_page_is_the_one_that_is_tested(page: str, plugin: str) -> None:
    shown = "".join(block.text for block in blocks(INTERNALS / f"{page}.md", "diff"))
    (file,) = (ROOT / "tests" / plugin / "plugin").glob("*.py")
    assert "".join(f"+{line}\n" for line in file.read_text().splitlines()) in shown


def test_the_snapshot_field_of_the_page_fits_the_source() -> None:
    (block,) = blocks(INTERNALS / "add-a-snapshot-field.md", "diff")
    lines = [line[1:] for line in block.text.splitlines() if line.startswith(" ")]
    source = (ROOT / "src/paceline/training/snapshots/train_state.py").read_text()
    assert "\n".join(lines) in source
