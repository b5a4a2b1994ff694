"""What `paceline tune` gains on ten recipes and scripts: a table.

    python -m benchmarks.tuning [--quick] [--only NAMES] [--budget 5m] [--seconds S] [--json FILE]

Each is tuned as a user would, within the budget. What is taken was measured again by trials of its
own, in pairs with the training as it is: that is the speed in the table. The rest stays as it was;
what may change the result waits for `--check-quality`, which isn't asked for here. `--quick` gives
each training a budget that is enough for a trial or two.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.commands import ROOT
from benchmarks.figures import Figure, Report, markdown, parser
from benchmarks.mnist_shaped import write_mnist_shaped
from paceline.options.command_line import words
from tests.support.cifar_files import write_cifar10

SCRIPT = ROOT / "benchmarks" / "tuning_script.py"
_CLASSES, _PHOTOS = 4, 200


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is tuned."""

    words: tuple[str, ...]
    """Recipe or script, and its options."""
    script_args: tuple[str, ...] = ()
    data: Callable[[Path], Path] | None = None
    """Writes what it reads below a directory; the words `{data}` then name that."""

    def command(self, place: Path, options: Sequence[str]) -> list[str]:
        """Write the command; `place` is for the data, the trials and the result."""
        data = str(self.data(place / "data") if self.data else "")
        own = ["--output", str(place / "tuned.toml"), "--tune-dir", str(place / "trials")]
        words = [word.replace("{data}", data) for word in (*self.words, *options, *own)]
        after = [word.replace("{data}", data) for word in self.script_args]
        command = [sys.executable, "-m", "paceline", "tune", *words]
        return [*command, "--", *after] if after else command


def _photos(place: Path) -> Path:
    """Write a folder of photographs, 500x375 JPEG; gives it."""
    random = np.random.default_rng(1)
    for name in range(_CLASSES):
        folder = place / "train" / f"class{name}"
        folder.mkdir(parents=True)
        for number in range(_PHOTOS // _CLASSES):
            coarse = random.integers(0, 256, (24, 32, 3), dtype=np.uint8)
            image = Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC)
            image.save(folder / f"{number:03}.jpg", quality=90)
    return place


def _mnist(place: Path) -> Path:
    return write_mnist_shaped(place, train=6_000, test=500)


def _cifar(place: Path) -> Path:
    return write_cifar10(place, train=1_400, test=300).parent


def _script(job: str, data: Callable[[Path], Path] | None = None) -> Target:
    return Target(words=(str(SCRIPT),), script_args=(job, *(("{data}",) * bool(data))), data=data)


TARGETS: Mapping[str, Target] = {
    "recipe digits": Target(words=("digits",)),
    "recipe mnist": Target(words=("mnist", "--data-dir", "{data}"), data=_mnist),
    "recipe fashion-wideresnet": Target(
        words=("fashion-wideresnet", "--width", "1", "--data-dir", "{data}"), data=_mnist
    ),
    "recipe cifar10-wideresnet": Target(
        words=("cifar10-wideresnet", "--width", "1", "--data-dir", "{data}"), data=_cifar
    ),
    "recipe synthetic, ResNet-18": Target(
        words=("synthetic", "--size", "32", "--classes", "10", "--global-batch", "64")
    ),
    "script like pytorch/examples' mnist": _script("mnist"),
    "script like those for CIFAR-10": _script("cifar"),
    "script like nanoGPT": _script("nanogpt"),
    "script like the word language model": _script("words"),
    "script like pytorch/examples' imagenet": _script("photos", _photos),
}


def tune(target: Target, place: Path, options: Sequence[str]) -> Mapping[str, Any]:
    """Tune, and read what was found.

    Raises:
        CalledProcessError: It couldn't be tuned.
    """
    place.mkdir()
    subprocess.run(target.command(place, options), check=True, cwd=ROOT)
    found: Mapping[str, Any] = json.loads((place / "trials" / "tune.json").read_text())
    return found


def row(name: str, found: Mapping[str, Any], took_s: float) -> tuple[str, ...]:
    """Write what a tuning came to, as cells."""
    confirmed = found["confirmed"]
    taken = confirmed if confirmed and confirmed["verdict"] == "faster" else None
    others = [each for each in found["tried"] if not (taken and _within(each, taken))]
    left = ", ".join(f"{_spelled(each['settings'])} {_speed(each)}" for each in others)
    named = _spelled(taken["settings"]) if taken else "nothing"
    return (name, named, _speed(taken) if taken else "as it was", left, f"{took_s / 60:.1f} min")


def _within(each: Mapping[str, Any], taken: Mapping[str, Any]) -> bool:
    return set(each["settings"].items()) <= set(taken["settings"].items())


def _spelled(settings: Mapping[str, Any]) -> str:
    return f"`{' '.join(words(settings))}`"


def _speed(each: Mapping[str, Any]) -> str:
    if each["mean"] is None:
        return str(each["verdict"]).partition(":")[0]
    bounds = "" if each["high"] is None else f" ({each['low']:.2f}-{each['high']:.2f})"
    return f"{each['mean']:.2f} x{bounds}"


def main() -> int:
    """Tune all, and report."""
    made = parser(__doc__ or "")
    made.add_argument("--only", nargs="+", metavar="WORD", help="those whose names hold a word")
    made.add_argument("--budget", help="of each tuning (default: 5m)")
    made.add_argument("--seconds", default="4", help="of each trial")
    arguments = made.parse_args()
    budget = arguments.budget or ("15s" if arguments.quick else "5m")
    options = ("--budget", budget, "--seconds", arguments.seconds)
    chosen = arguments.only or ([next(iter(TARGETS))] if arguments.quick else [""])
    report, rows = Report(name="tuning"), []
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        for number, (name, target) in enumerate(TARGETS.items()):
            if not any(word in name for word in chosen):
                continue
            begun_s = monotonic()
            found = tune(target, Path(scratch) / str(number), options)
            rows.append(row(name, found, monotonic() - begun_s))
            report.raw[name] = found
            confirmed = found["confirmed"]
            if confirmed and confirmed["mean"] is not None:
                what = f"{name}: {_spelled(confirmed['settings'])}"
                sure = (confirmed["low"] or 0.0, confirmed["high"] or float("inf"))
                count = len(confirmed["ratios"])
                figure = Figure(
                    what=what, value=confirmed["mean"], unit="x", sure=sure, count=count
                )
                report.figures.append(figure)
    print("\n" + markdown(("training", "taken", "speed (95% bounds)", "left", "took"), rows))
    return report.finish(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
