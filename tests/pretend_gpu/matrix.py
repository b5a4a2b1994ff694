"""Every recipe with every way to train it, on 1 and 2 pretend devices: what a step costs.

python -m tests.pretend_gpu.matrix                    what CI runs
python -m tests.pretend_gpu.matrix --all [REGEX]      all cells, or those with such a name
python -m tests.pretend_gpu.matrix --check            exit 1 where budgets.csv is exceeded
python -m tests.pretend_gpu.matrix --all --write      make what is measured the budgets
"""

import argparse
import csv
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch

from tests.pretend_gpu.counters import SYNCS, counted_steps, usual
from tests.pretend_gpu.host import Host
from tests.script.idioms.idioms import BY_NAME
from tests.support.cifar_files import write_cifar10
from tests.support.idx_files import write_mnist
from tests.support.image_files import write_image_folder
from tests.support.stl10_files import write_stl10

BUDGETS = Path(__file__).parent / "budgets.csv"
"""What a step of each cell may cost."""
USUAL = ("launches", "allocations", "h2d", "d2h", "d2d", "collectives")
"""What is counted of a usual step; it depends on the version of torch."""
WORST: Mapping[str, tuple[str, ...]] = {
    "syncs": SYNCS,
    "pageable": ("h2d_pageable", "d2h_pageable"),
}
"""What is counted of the worst step."""
_COLUMNS = ("cell", "torch", *USUAL, *WORST)
DEVICES, PRECISIONS = (1, 2), ("fp32", "bf16", "fp16")
WAYS: Mapping[str, tuple[str, ...]] = {
    "allreduce": (),
    "shards": ("--shards", "4"),
    "bf16": ("--sync-precision", "bf16"),
    "powersgd": ("--sync", "powersgd", "--sync-warmup-steps", "2"),
}
"""Ways of combining gradients, and their options."""


SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
import paceline

with paceline.session() as s:
    torch.manual_seed(1)
    images, labels = torch.randn(144, 1, 8, 8), torch.arange(144) % 4
    data = torch.utils.data.TensorDataset(images, labels)
    model = s.model(nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)
    ))
    s.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    loader, validation = s.loader(data), s.eval_loader(data)
    for epoch in s.epochs():
        for inputs, targets in loader:
            s.step(F.cross_entropy(model(inputs), targets))
        s.evaluate(lambda batch: {"loss": F.cross_entropy(model(batch[0]), batch[1])}, validation)
"""


def _write_script(at: Path) -> None:
    at.mkdir()
    (at / "train.py").write_text(SCRIPT)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe with little data and a small network; or a script."""

    options: str = ""
    command: str = ""
    """Instead of `train RECIPE` and options."""
    write: Callable[[Path], object] = lambda _: None
    """Writes its data into a directory, which `{data}` in the options stands for."""
    for_ways: Mapping[str, str] = field(default_factory=dict)
    """Options that it needs besides, by the way; they replace those of the same name."""
    own: str | None = None
    """A script's own arguments, where these say how much it trains rather than options."""
    has_shards: bool = True
    """Whether it can be trained with `--shards`."""


def _idiom(name: str, own: str = "", *, has_shards: bool = True) -> Recipe:
    """Give a script in another project's idiom, which has its data, batches and epochs itself."""
    return Recipe(command=f"run {BY_NAME[name].after}", own=own, has_shards=has_shards)


RECIPES: Mapping[str, Recipe] = {
    "digits": Recipe(options="--global-batch 64"),
    "synthetic": Recipe(options="--model resnet18 --size 32 --samples 64 --classes 10 --lr 1e-3"),
    "mnist": Recipe(
        options="--data-dir {data} --no-download", write=lambda at: write_mnist(at, 144, 32)
    ),
    "fashion-wideresnet": Recipe(
        options="--data-dir {data} --no-download --width 1",
        write=lambda at: write_mnist(at, 144, 32, name="FashionMNIST"),
    ),
    "cifar10-wideresnet": Recipe(
        options="--data-dir {data} --no-download --width 1",
        write=lambda at: write_cifar10(at, 150, 30),
        for_ways={"shards": "--no-sync-batchnorm"},
    ),
    "stl10-resnet18": Recipe(
        options="--data-dir {data} --no-download --size 32", write=lambda at: write_stl10(at, 64)
    ),
    "imagefolder-vgg19": Recipe(
        options="--data-dir {data} --model vgg11 --weights none --hidden 8 --size 32",
        write=lambda at: write_image_folder(at, {"train": 24, "val": 4}),
        for_ways={"shards": "--size 224"},  # others pool in a way that isn't deterministic
    ),
    "a script": Recipe(command="run {data}/train.py", write=_write_script),
    "nanogpt": _idiom("nanogpt"),
    "vae": _idiom("vae"),
    "dcgan": _idiom("dcgan", "--niter 5", has_shards=False),
    "super_resolution": _idiom("super_resolution", "--nEpochs 4"),
    "mnist_rnn": _idiom("mnist_rnn"),
    "cifar": _idiom("cifar", "--epochs 5"),
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One way to train one recipe."""

    recipe: str
    way: str
    precision: str
    devices: int

    @property
    def name(self) -> str:
        """What it is called in tables."""
        return f"{self.recipe} {self.way} {self.precision} on {self.devices}"

    def command(self, data: Path) -> list[str]:
        """Give the words of the command line behind `paceline`."""
        recipe = RECIPES[self.recipe]
        text = (recipe.command or f"train {self.recipe} {recipe.options}").format(data=data)
        if (besides := recipe.for_ways.get(self.way)) is not None:
            text = f"{text.partition(besides.partition(' ')[0])[0]} {besides}"
        words = [*text.split(), *WAYS[self.way], "--precision", self.precision]
        if "--global-batch" not in words and recipe.own is None:
            words += ["--global-batch", "8"]
        if self.devices == 1:  # no launcher: it is the same for all, and takes half of the time
            words += ["--on", "here"]
        words += ["--time-budget", "none", "--progress", "off", "--run-dir", "run"]
        if recipe.own is None:
            return [*words, "--epochs", "2"]
        return [*words, "--", *recipe.own.split()]


def all_cells() -> list[Cell]:
    """List the whole matrix."""
    return [
        Cell(recipe=name, way=way, precision=precision, devices=devices)
        for (name, recipe), way, precision, devices in product(
            RECIPES.items(), WAYS, PRECISIONS, DEVICES
        )
        if way != "shards" or recipe.has_shards
    ]


def measure(gpus: Host, cell: Cell, scratch: Path) -> Counter[str]:
    """Train a cell to its end.

    Returns:
        What a step costs the worker that it costs the most, by the names of `USUAL` and `WORST`.

    Raises:
        AssertionError: It didn't come to its end, or waited in a step.
    """
    data, counters = scratch / "data", scratch / "counters"
    counters.mkdir(parents=True)
    RECIPES[cell.recipe].write(data)
    done = gpus.paceline(
        *cell.command(data),
        directory=scratch,
        devices=cell.devices,
        PRETEND_GPU_COUNTERS=str(counters),
        PRETEND_GPU_WAITS="refused",
    )
    assert done.returncode == 0, f"{cell.name}: {done.stdout}{done.stderr}"
    workers = counted_steps(counters)
    assert len(workers) == cell.devices, f"{cell.name}: {len(workers)} workers made steps"
    found = {name: max(usual(steps, name) for steps in workers) for name in USUAL}
    for name, of_these in WORST.items():
        found[name] = max(sum(step[one] for one in of_these) for s in workers for step in s)
    return Counter(found)


def budgets() -> dict[str, dict[str, str]]:
    """Read the budgets, by the cells' names."""
    with BUDGETS.open() as file:
        return {row["cell"]: row for row in csv.DictReader(file)}


def exceeded(cell: Cell, found: Counter[str]) -> list[str]:
    """List what a cell's step costs more than it may, and what it may."""
    row = budgets().get(cell.name)
    if row is None:
        return [f"{cell.name} has no budget: measure it with --all '{cell.name}' --write"]
    names = [*WORST, *(USUAL if row["torch"] == _torch() else ())]
    return [
        f"{cell.name}: {found[name]} {name} a step, at most {row[name]}"
        for name in names
        if found[name] > int(row[name])
    ]


def _torch() -> str:
    return ".".join(torch.__version__.split(".")[:2])


def write_budgets(measured: Mapping[str, Counter[str]]) -> None:
    """Make what was measured the budgets of these cells; others stay as they are."""
    rows: dict[str, Mapping[str, object]] = dict(budgets()) if BUDGETS.exists() else {}
    for cell, found in measured.items():
        rows[cell] = {"cell": cell, "torch": _torch(), **found}
    with BUDGETS.open("w", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[cell.name] for cell in all_cells() if cell.name in rows)


def covering() -> list[Cell]:
    """List what CI runs: each two values of recipe, way, precision and devices meet, or nearly."""
    return [
        Cell(recipe=recipe, way=way, precision=precision, devices=devices)
        for recipe, way, precision, devices in (
            ("digits", "allreduce", "fp16", 2),
            ("digits", "powersgd", "fp16", 1),
            ("digits", "shards", "fp16", 2),
            ("synthetic", "shards", "fp32", 1),
            ("synthetic", "powersgd", "bf16", 1),
            ("mnist", "powersgd", "fp16", 2),
            ("mnist", "bf16", "bf16", 2),
            ("fashion-wideresnet", "bf16", "fp32", 2),
            ("cifar10-wideresnet", "allreduce", "fp16", 2),  # and synchronized BatchNorm
            ("cifar10-wideresnet", "shards", "bf16", 1),
            ("stl10-resnet18", "bf16", "bf16", 1),
            ("imagefolder-vgg19", "allreduce", "fp32", 1),
            ("a script", "bf16", "fp16", 2),
            ("nanogpt", "allreduce", "bf16", 2),
            ("vae", "powersgd", "fp32", 1),
            ("dcgan", "bf16", "fp32", 2),
            ("super_resolution", "allreduce", "fp16", 1),
            ("mnist_rnn", "allreduce", "fp16", 2),
            ("cifar", "shards", "fp32", 1),
        )
    ]


def _main() -> int:
    from tests.pretend_gpu.build import build

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", nargs="?", const="", metavar="REGEX", help="which of all cells")
    parser.add_argument("--check", action="store_true", help="exit 1 where a budget is exceeded")
    parser.add_argument("--write", action="store_true", help="make what is measured the budgets")
    asked = parser.parse_args()
    found = covering()
    if asked.all is not None:
        found = [cell for cell in all_cells() if re.search(asked.all, cell.name)]
    wrong = []
    print("| " + " | ".join(_COLUMNS) + " |\n" + "|---" * len(_COLUMNS) + "|")
    with Host(build()) as gpus:
        for cell in found:
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    measured = measure(gpus, cell, Path(scratch))
                except AssertionError as error:
                    wrong.append(str(error))
                    print(f"| {cell.name} | failed |", flush=True)
                    continue
            row = {"cell": cell.name, "torch": _torch(), **measured}
            print("| " + " | ".join(str(row[name]) for name in _COLUMNS) + " |", flush=True)
            if asked.write:
                write_budgets({cell.name: measured})
            else:
                wrong += exceeded(cell, measured)
    print("\n".join(["", *wrong]))
    return 1 if wrong and asked.check else 0


if __name__ == "__main__":
    sys.exit(_main())
