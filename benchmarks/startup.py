"""From a command to its first line and its first training step; the time of `paceline --help`.

    python -m benchmarks.startup [--quick] [--json FILE]

Interleaved runs of `paceline train` and of torchrun with a script that does the same job by hand:
same network, same 60,000 MNIST-shaped images in IDX files, two workers of one thread, one step.
Measured from before the process is started until rank 0 has finished its first optimizer step.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from benchmarks.commands import environment, finish, start, torchrun_command, train_command
from benchmarks.figures import Report, median_figure, parser, ratios
from benchmarks.random_data import write_mnist_shaped
from benchmarks.stamps import read_stamps

_BATCH = 128
_SIDES = ("paceline", "torchrun")


def seconds_to_first_step(command: Sequence[str], stamps: Path) -> float:
    """Run a command to its end; give the time until rank 0 had finished its first step."""
    output = stamps / "output.txt"
    started_s = time.time()
    finish(start(command, output), output)
    first = [s.first_step_s for s in read_stamps(stamps) if s.rank == 0 and s.first_step_s]
    if len(first) != 1:
        raise RuntimeError(f"no first step was seen:\n{output.read_text()[-4000:]}")
    return first[0] - started_s


def run_side(side: str, directory: Path, number: int) -> float:
    """Run one of the sides once."""
    stamps = directory / f"{number}-{_SIDES.index(side)}"
    stamps.mkdir()
    if side == "paceline":
        options = {"epochs": 1, "global_batch": _BATCH, "samples": _BATCH}
        places = {"data_dir": directory, "stamps": stamps}
        command = train_command(
            "benchmarks.jobs:stamped_mnist", stamps / "run", **options, **places
        )
    else:
        command = torchrun_command("-m", "benchmarks.bare", "--data-dir", directory)
        command += ["--stamps", str(stamps), "--samples", str(_BATCH)]
    return seconds_to_first_step(command, stamps)


def help_seconds(runs: int) -> list[float]:
    """Time `paceline --help`."""
    command = [str(Path(sys.executable).with_name("paceline")), "--help"]
    found = []
    for _ in range(runs):
        started_s = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment())
        found.append(time.perf_counter() - started_s)
    return found


def first_line_seconds(runs: int, directory: Path) -> list[float]:
    """Time `paceline train` until a person at a terminal reads the first line."""
    found = []
    for number in range(runs):
        terminal, theirs = os.openpty()
        command = train_command("digits", directory / f"line-{number}", epochs=1, progress="auto")
        started_s = time.perf_counter()
        process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env=environment())
        os.close(theirs)
        read = b""
        while b"\n" not in read:
            read += os.read(terminal, 4096)
        found.append(time.perf_counter() - started_s)
        process.terminate()
        with suppress(OSError):  # so a terminal ends that nobody writes to any more
            while os.read(terminal, 4096):
                pass
        process.wait()
        os.close(terminal)
    return found


def main() -> int:
    """Measure and report."""
    arguments = parser(__doc__ or "").parse_args()
    rounds, images = (2, 6000) if arguments.quick else (8, 60_000)
    seconds: dict[str, list[float]] = {side: [] for side in _SIDES}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        directory = Path(scratch)
        write_mnist_shaped(directory, images, images // 6)
        run_side("paceline", directory, -1)  # warms the file cache
        run_side("torchrun", directory, -1)
        for number in range(rounds):
            for side in _SIDES if number % 2 == 0 else _SIDES[::-1]:
                seconds[side].append(run_side(side, directory, number))
        help_s = help_seconds(3 if arguments.quick else 15)
        line_s = first_line_seconds(3 if arguments.quick else 15, directory)
    ours, lean = (seconds[side] for side in _SIDES)
    report = Report(name="startup", raw={**seconds, "help": help_s, "line": line_s})
    report.remarks = [
        f"two workers of 1 thread, Gloo, {images} images read, one step of batch {_BATCH}; "
        "the script by hand reads the files with NumPy"
    ]
    report.figures = [
        median_figure("paceline --help", help_s, "s", at_most=0.3),
        median_figure("paceline train: first line on a terminal", line_s, "s", at_most=0.3),
        median_figure("first step: paceline / torchrun", ratios(ours, lean), "x", at_most=1.15),
        median_figure("- paceline train", ours, "s"),
        median_figure("- torchrun, by hand", lean, "s"),
    ]
    return report.finish(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
