"""Every recipe with every way to train it, on 1 and 2 pretend devices: what a step costs.

python -m tests.pretend_gpu.matrix                what CI runs
python -m tests.pretend_gpu.matrix --all REGEX    all cells with such a name
"""

import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from tests.pretend_gpu.counters import SYNCS, counted_a_step
from tests.pretend_gpu.host import Host
from tests.support.cifar_files import write_cifar10
from tests.support.idx_files import write_mnist
from tests.support.image_files import write_image_folder
from tests.support.stl10_files import write_stl10

_PATTERN = 2
SHOWN = ("launches", "syncs", "h2d", "d2h", "d2d", "pageable", "collectives")
"""What is said of a step."""
DEVICES, PRECISIONS = (1, 2), ("fp32", "bf16", "fp16")
WAYS: Mapping[str, tuple[str, ...]] = {
    "allreduce": (),
    "shards": ("--shards", "4"),
    "bf16": ("--sync", "bf16"),
    "fp16": ("--sync", "fp16"),
    "powersgd": ("--sync", "powersgd", "--sync-warmup-steps", "2"),
    "local": ("--sync", "local", "--sync-every", "2", "--sync-warmup-steps", "2"),
    "diloco": ("--sync", "diloco", "--sync-every", "2", "--sync-warmup-steps", "2"),
    "auto": ("--sync", "auto"),
}
"""Ways of combining gradients, and their options."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe with little data and a small network."""

    options: str
    write: Callable[[Path], object] = lambda _: None
    """Writes its data into a directory, which `{data}` in the options stands for."""
    shards: str = ""
    """Options that it needs besides with --shards."""


RECIPES: Mapping[str, Recipe] = {
    "digits": Recipe(options="--global-batch 64"),
    "synthetic": Recipe(options="--model resnet18 --size 32 --samples 144 --classes 10"),
    "mnist": Recipe(
        options="--data-dir {data} --no-download", write=lambda at: write_mnist(at, 144, 32)
    ),
    "fashion-wideresnet": Recipe(
        options="--data-dir {data} --no-download --width 1",
        write=lambda at: write_mnist(at, 144, 32),
    ),
    "cifar10-wideresnet": Recipe(
        options="--data-dir {data} --no-download --width 1",
        write=lambda at: write_cifar10(at, 150, 30),
        shards="--no-sync-batchnorm",
    ),
    "stl10-resnet18": Recipe(
        options="--data-dir {data} --no-download --size 32", write=lambda at: write_stl10(at, 144)
    ),
    "imagefolder-vgg19": Recipe(
        options="--data-dir {data} --model vgg11 --weights none --size 32 --hidden 8",
        write=lambda at: write_image_folder(at, {"train": 48, "val": 4}),
        shards="--size 224",
    ),
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

    def options(self, data: Path) -> list[str]:
        """Give the words of the command line behind `train`."""
        recipe = RECIPES[self.recipe]
        text = recipe.options.format(data=data)
        if self.way == "shards":
            text += f" {recipe.shards}"
        words = [self.recipe, *text.split(), *WAYS[self.way], "--precision", self.precision]
        if "--global-batch" not in words:
            words += ["--global-batch", "8"]
        return [*words, "--epochs", "1", "--time-budget", "none", "--progress", "off"]


def all_cells() -> list[Cell]:
    """List the whole matrix."""
    return [
        Cell(recipe=recipe, way=way, precision=precision, devices=devices)
        for recipe, way, precision, devices in product(RECIPES, WAYS, PRECISIONS, DEVICES)
    ]


def measure(gpus: Host, cell: Cell, scratch: Path) -> Counter[str]:
    """Train a cell to its end.

    Returns:
        What a step costs the worker that it costs the most. Where steps take as long as half a
        second each has an exchange: 4 waits and 2 copies to the host.

    Raises:
        AssertionError: It didn't come to its end.
    """
    data, counters = scratch / "data", scratch / "counters"
    counters.mkdir(parents=True)
    RECIPES[cell.recipe].write(data)
    done = gpus.paceline(
        *("train", *cell.options(data), "--run-dir", str(scratch / "run")),
        directory=scratch,
        devices=cell.devices,
        PRETEND_GPU_COUNTERS=str(counters),
    )
    assert done.returncode == 0, f"{cell.name}: {done.stdout}{done.stderr}"
    found = [_shown(each) for each in counted_a_step(counters)]
    assert len(found) == cell.devices, f"{cell.name}: {len(found)} workers made steps"
    return Counter({name: max(each[name] for each in found) for name in SHOWN})


def _shown(counted: Counter[str]) -> Counter[str]:
    sums = {
        "syncs": sum(counted[name] for name in SYNCS),
        "pageable": counted["h2d_pageable"] + counted["d2h_pageable"],
    }
    return Counter({name: sums.get(name, counted[name]) for name in SHOWN})


def covering() -> list[Cell]:
    """List what CI runs: each two values of recipe, way, precision and devices meet, or nearly."""
    return [
        Cell(recipe=recipe, way=way, precision=precision, devices=devices)
        for recipe, way, precision, devices in (
            ("digits", "allreduce", "fp32", 2),
            ("digits", "shards", "fp16", 1),
            ("synthetic", "shards", "fp32", 2),
            ("synthetic", "powersgd", "bf16", 2),
            ("mnist", "local", "fp16", 2),
            ("mnist", "auto", "bf16", 1),
            ("fashion-wideresnet", "bf16", "fp32", 1),
            ("fashion-wideresnet", "diloco", "bf16", 2),
            ("cifar10-wideresnet", "allreduce", "fp16", 2),
            ("cifar10-wideresnet", "shards", "bf16", 1),
            ("stl10-resnet18", "fp16", "bf16", 2),
            ("imagefolder-vgg19", "allreduce", "fp32", 1),
        )
    ]


def _main() -> None:
    from tests.pretend_gpu.build import build

    whole = len(sys.argv) > _PATTERN and sys.argv[1] == "--all"
    cells = (
        [c for c in all_cells() if re.search(sys.argv[_PATTERN], c.name)] if whole else covering()
    )
    print("| cell |", " | ".join(SHOWN), "|")
    print("|---|", "|".join("---" for _ in SHOWN), "|", sep="")
    with Host(build()) as gpus:
        for cell in cells:
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    found = measure(gpus, cell, Path(scratch))
                    print(_row(cell, found), flush=True)
                except AssertionError as error:
                    print(f"| {cell.name} | failed: {error} |", flush=True)


def _row(cell: Cell, found: Counter[str]) -> str:
    return f"| {cell.name} | " + " | ".join(str(found[name]) for name in SHOWN) + " |"


if __name__ == "__main__":
    _main()
