"""Compare whole trainings with their recorded results, `tests/hashes.json`.

    python -m tests.hashes [--quick] [--only TEXT] [--write] [--jobs 2]

With `--shards`, a training must have the same bits on any number of workers, and the recorded ones.
Without, its losses must be the recorded ones to 1e-6 on each number of workers. Bits depend on the
CPU and on PyTorch's version: where these differ, only the numbers of workers are compared.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from tests.script.idioms.idioms import IDIOMS
from tests.support.cifar_files import write_cifar10
from tests.support.idx_files import write_mnist
from tests.support.image_files import write_image_folder
from tests.support.stl10_files import write_stl10

RECORDED = Path(__file__).with_suffix(".json")
TOLERANCE = 1e-6
"""Relative, of losses without shards."""
_LIMIT_S = 900.0
_BITS = ("weights_sha256", "state_sha256", "val_loss", "val_accuracy", "steps", "samples_seen")
_LOSSES = ("train_loss", "val_loss", "steps", "samples_seen")
_USUAL = "--threads 1 --loader-workers 0 --progress off --device cpu --run-dir run"

Result = Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A command, run on several numbers of workers."""

    name: str
    words: str
    """The `paceline` command, without the options of every training."""
    arguments: tuple[str, ...] = ()
    """Behind `--`."""
    shards: int | None = None
    workers: tuple[int, ...] = (1, 2)
    write_data: Callable[[Path], object] | None = None
    """Writes what is read into the working directory."""
    interrupted: bool = False
    """Whether SIGTERM stops it within an epoch, and it is resumed on one worker more."""
    same_as: str = ""
    """Name of an earlier training with the same result."""
    quick: bool = False

    def command(self, workers: int) -> list[str]:
        """Return the words of the command on this many workers."""
        shards = [] if self.shards is None else ["--shards", str(self.shards)]
        words = [*self.words.split(), *_USUAL.split(), "--workers", str(workers), *shards]
        return [*words, *(("--", *self.arguments) if self.arguments else ())]


_DIGITS = "train digits --epochs 3 --clip-norm 1 --target-accuracy none"
_TINY = (
    "--width 1 --no-download --data-dir data --global-batch 16 --epochs 2 --target-accuracy none"
)
_FOLDER = (
    "--data-dir data --weights none --model vgg11_bn --size 32 --hidden 32 --time-budget none"
    " --global-batch 8 --lr 0.002 --epochs 2 --target-accuracy none"
)
_RECIPES: Mapping[str, tuple[str, Callable[[Path], object]]] = {
    "mnist": (
        "--no-download --data-dir data --epochs 2",
        partial(write_mnist, train=160, test=60, classes=3),
    ),
    "fashion-wideresnet": (
        _TINY,
        partial(write_mnist, train=160, test=60, classes=3, name="FashionMNIST"),
    ),
    "cifar10-wideresnet": (_TINY, partial(write_cifar10, train=160, test=60, classes=3)),
    "stl10-resnet18": (
        _TINY.replace("--width 1", "--size 32"),
        partial(write_stl10, train=96, test=60, classes=3),
    ),
    "imagefolder-vgg19": (_FOLDER, partial(write_image_folder, counts={"train": 16, "val": 8})),
}


def trainings() -> list[Training]:
    """List all trainings."""
    digits = [
        Training(name="digits", words=_DIGITS, quick=True),
        Training(
            name="digits --shards 8", words=_DIGITS, shards=8, workers=(1, 2, 3, 8), quick=True
        ),
        Training(name="digits --shards 6", words=_DIGITS, shards=6, workers=(1, 2, 3, 6)),
        Training(
            name="digits --shards 8, resumed",
            same_as="digits --shards 8",
            words=_DIGITS,
            shards=8,
            workers=(2,),
            interrupted=True,
            quick=True,
        ),
    ]
    recipes = [
        Training(
            name=recipe + (" --shards 4" if shards else ""),
            words=f"train {recipe} {options}" + (" --no-sync-batchnorm" if shards else ""),
            shards=shards,
            write_data=lambda place, write=write: write(place / "data"),  # type: ignore[misc]
        )
        for recipe, (options, write) in _RECIPES.items()
        for shards in (None, 4)
    ]
    idioms = [
        Training(
            name=f"script {idiom.name}" + (" --shards 2" if shards else ""),
            words=f"run {idiom.after} {' '.join(idiom.options if not shards else ())}",
            arguments=idiom.arguments,
            shards=shards,
            write_data=_write_for_mnist if idiom.name == "mnist" else None,
            quick=idiom.name == "siamese" and shards is not None,
        )
        for idiom in IDIOMS
        for shards in (None, 2)
        if shards is None or idiom.shards
    ]
    return digits + recipes + idioms


def _write_for_mnist(place: Path) -> None:
    write_mnist(place / "data", train=500, test=100, gz=False)


def train(training: Training, workers: int) -> Result:
    """Train once, in processes and a directory of its own, and return the run's summary.

    Raises:
        RuntimeError: The training failed. The message ends with its output.
    """
    with tempfile.TemporaryDirectory(prefix="paceline-hashes-") as scratch:
        place = Path(scratch)
        if training.write_data is not None:
            training.write_data(place)
        words = training.command(workers)
        if training.interrupted:
            _interrupt([*words, "--snapshot-every-steps", "3"], place)
            words = ["resume", "run", "--workers", str(workers + 1)]
        _finish(_start(words, place), 0)
        summary: Result = json.loads((place / "run" / "summary.json").read_text())
    names = _LOSSES if training.shards is None else _BITS
    return {name: summary[name] for name in names}


def _start(words: Sequence[str], place: Path) -> "subprocess.Popen[str]":
    quiet = {n: v for n, v in os.environ.items() if not n.startswith("PACELINE_")}
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("paceline")), *words],
        cwd=place,
        env={**quiet, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(process: "subprocess.Popen[str]", wanted: int) -> None:
    output, _ = process.communicate(timeout=_LIMIT_S)
    if process.returncode != wanted:
        raise RuntimeError(f"{process.args!r} ended with {process.returncode}:\n{output}")


def _interrupt(words: Sequence[str], place: Path) -> None:
    """Start a training and stop it once it has a snapshot within an epoch."""
    process = _start(words, place)
    snapshots = place / "run" / "snapshots"
    while process.poll() is None and not any(snapshots.glob("step-*[1-9]")):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _finish(process, 75)


def differences(training: Training, found: Mapping[int, Result], recorded: Result) -> list[str]:
    """Describe where results differ from each other, or from what was recorded.

    Args:
        training: What was trained.
        found: Its results by number of workers.
        recorded: Entry of `tests/hashes.json`; empty if it holds for another CPU or PyTorch.
    """
    if training.shards is None:
        wanted = {workers: recorded.get(str(workers), result) for workers, result in found.items()}
    else:
        wanted = dict.fromkeys(found, recorded or next(iter(found.values())))
    return [
        f"{training.name} on {workers}: {name} is {value}, not {other[name]}"
        for workers, result in found.items()
        if isinstance(other := wanted[workers], Mapping)
        for name, value in result.items()
        if not _equal(value, other[name], 0.0 if training.shards else TOLERANCE)
    ]


def _equal(one: object, other: object, tolerance: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= tolerance * abs(other)
    return one == other


def platform() -> dict[str, str]:
    """Return what bits depend on besides Paceline."""
    lines = (line.split(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    cpu = {words[0].strip(): words[-1].strip() for words in lines}
    names = ("vendor_id", "cpu family", "model", "stepping")
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        "torch": torch.__version__,
        "cpu": " ".join([*(cpu.get(name, "") for name in names), capability]),
    }


def main(arguments: Sequence[str]) -> int:
    """Run the command. Returns 1 where a result differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="four trainings, a minute")
    parser.add_argument("--only", default="", help="trainings whose name contains this")
    parser.add_argument("--write", action="store_true", help="record the results")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    options = parser.parse_args(arguments)
    recorded = json.loads(RECORDED.read_text()) if RECORDED.exists() else {"trainings": {}}
    here = platform()
    comparable = recorded.get("platform") == here
    if not comparable:
        print(f"recorded on {recorded.get('platform')}, this is {here}: only workers are compared")
    chosen = [
        training
        for training in trainings()
        if options.only in training.name and (training.quick or not options.quick)
    ]
    known = recorded["trainings"] if comparable else {}
    if options.write:
        known = {
            name: entry for name, entry in known.items() if name not in {t.name for t in chosen}
        }
    wrong: list[str] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        runs = {t.name: {n: pool.submit(train, t, n) for n in t.workers} for t in chosen}
        for training in chosen:
            found = {n: future.result() for n, future in runs[training.name].items()}
            name = training.same_as or training.name
            differing = differences(training, found, known.get(name, {}))
            print("\n".join(differing) or f"{training.name}: same", flush=True)
            wrong += differing
            if name not in known and not differing:
                known[name] = (
                    next(iter(found.values()))
                    if training.shards
                    else {str(n): result for n, result in found.items()}
                )
    if options.write:
        RECORDED.write_text(json.dumps({"platform": here, "trainings": known}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
