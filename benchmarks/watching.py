"""What rows within epochs, `paceline watch` and a tracker cost a training, all three together.

    python -m benchmarks.watching [--quick] [--json FILE]

Interleaved runs of `paceline train mnist` on the same MNIST-shaped images: with the usual
`--log-every`, W&B in offline mode, and `paceline watch` beside it; and with one row an epoch and
nobody looking. One worker of one thread leaves a core to those who look, two workers leave none.
Compared are the images/s of whole epochs, without the first two: there who looks is starting.
"""

import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.commands import environment, finish, start, train_command
from benchmarks.figures import Report, median_figure, parser, ratios
from benchmarks.mnist_shaped import write_mnist_shaped

_SIDES: Mapping[str, Mapping[str, object]] = {
    "watched": {"tracker": "wandb"},
    "alone": {"log_every": 1_000_000},
}
_BATCH = 64


def images_per_s(side: str, workers: int, epochs: int, data: Path, place: Path) -> list[float]:
    """Train once; give the speed of each epoch but the first two, when those who look start."""
    place.mkdir()
    run, output = place / "run", place / "output.txt"
    options = {"workers": workers, "epochs": epochs, "global_batch": _BATCH, "data_dir": data}
    command = train_command("mnist", run, **options, **_SIDES[side])
    training = start(command, output)
    watching = None
    if side == "watched":
        while not (run / "run.json").exists() and training.poll() is None:
            time.sleep(0.02)
        watch = [str(Path(sys.executable).with_name("paceline")), "watch", str(run)]
        watching = subprocess.Popen(watch, stdout=subprocess.DEVNULL, env=environment())
    finish(training, output)
    if watching is not None and watching.wait(60):
        raise RuntimeError("paceline watch failed")
    with (run / "metrics.csv").open() as table:
        return [float(row["images_per_s"]) for row in csv.DictReader(table)][2:]


def main() -> int:
    """Measure and report."""
    arguments = parser(__doc__ or "").parse_args()
    os.environ["WANDB_MODE"] = "offline"
    rounds, epochs, images = (1, 3, 6000) if arguments.quick else (5, 14, 12_000)
    report = Report(name="watching")
    report.remarks = [f"mnist's network, batch {_BATCH}, {images:,} images, {epochs} epochs a run"]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        data = Path(scratch) / "data"
        data.mkdir()
        write_mnist_shaped(data, images, 1000)
        for workers in (1, 2):
            speeds: dict[str, list[float]] = {side: [] for side in _SIDES}
            for number in range(rounds):
                for side in list(_SIDES) if number % 2 == 0 else reversed(list(_SIDES)):
                    place = Path(scratch) / f"{workers}-{number}-{side}"
                    speeds[side] += images_per_s(side, workers, epochs, data, place)
            watched, alone = speeds["watched"], speeds["alone"]
            what = f"images/s watched / alone, {workers} of 2 cores training"
            report.figures.append(median_figure(what, ratios(watched, alone), "x", at_least=0.99))
            report.raw |= {f"{side}, {workers}": speeds[side] for side in _SIDES}
    return report.finish(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
