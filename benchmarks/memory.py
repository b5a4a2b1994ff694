"""Peak memory of a worker against that of a worker of a script written by hand.

    python -m benchmarks.memory [--quick] [--json FILE]

Three ways to run the mnist job on two workers, in turn: torchrun with a lean script (its tensors in
memory too), torchrun with Paceline in the same fresh processes, and `paceline train`, whose workers
are forked from a process that has torch imported. Peak RSS is the kernel's own high-water mark
(VmHWM, what `ru_maxrss` reports); it counts pages that workers share in each of them, so the
proportional (PSS) and private (USS) sizes are sampled too, five times a second. The speed of the
same runs, from the first step to the last, shows what memory buys: Paceline has the C library keep
freed memory for the next step.
"""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.commands import finish, start, torchrun_command, train_command
from benchmarks.figures import Figure, Report, median_figure, parser, ratios
from benchmarks.mnist_shaped import write_mnist_shaped
from benchmarks.stamps import read_stamps

_BATCH = 128
_SIDES = ("by hand under torchrun", "paceline under torchrun", "paceline train")
_POLL_S, _SMAPS_EVERY_S = 0.005, 0.2
_MB = 1e6


@dataclass(kw_only=True)
class Peaks:
    """Largest sizes of one worker that were seen, in bytes."""

    rss: int = 0
    pss: int = 0
    uss: int = 0


@dataclass(kw_only=True)
class Sides:
    """The most that any worker took, by run, in megabytes."""

    rss: list[float] = field(default_factory=list)
    pss: list[float] = field(default_factory=list)
    uss: list[float] = field(default_factory=list)
    images_per_s: list[float] = field(default_factory=list)


def watch(command: Sequence[str], stamps: Path) -> list[Peaks]:
    """Run a command to its end; give the peaks of each of its workers."""
    output = stamps / "output.txt"
    process = start(command, output)
    peaks: dict[int, Peaks] = {}
    smaps_due_s = 0.0
    while process.poll() is None:
        for stamp in read_stamps(stamps):
            seen = peaks.setdefault(stamp.pid, Peaks())
            seen.rss = max(seen.rss, _field(stamp.pid, "status", ("VmHWM",)))
            if time.monotonic() >= smaps_due_s:
                seen.pss = max(seen.pss, _field(stamp.pid, "smaps_rollup", ("Pss",)))
                private = ("Private_Clean", "Private_Dirty")
                seen.uss = max(seen.uss, _field(stamp.pid, "smaps_rollup", private))
        if time.monotonic() >= smaps_due_s:
            smaps_due_s = time.monotonic() + _SMAPS_EVERY_S
        time.sleep(_POLL_S)
    finish(process, output)
    return list(peaks.values())


def _field(pid: int, file: str, names: Sequence[str]) -> int:
    """Add up lines of a file under /proc; 0 when the process has gone."""
    try:
        lines = Path(f"/proc/{pid}/{file}").read_text().splitlines()
    except OSError:
        return 0
    parts = (line.split() for line in lines)
    return sum(1024 * int(p[1]) for p in parts if p and p[0].rstrip(":") in names)


def run_side(side: str, directory: Path, stamps: Path, samples: int) -> list[Peaks]:
    """Run one of the sides once."""
    stamps.mkdir()
    if side == "by hand under torchrun":
        command = torchrun_command("-m", "benchmarks.bare", "--data-dir", directory)
        command += ["--stamps", str(stamps), "--samples", str(samples)]
    else:
        options = {"epochs": 1, "global_batch": _BATCH, "samples": samples}
        places = {"data_dir": directory, "stamps": stamps}
        recipe = "benchmarks.jobs:stamped_mnist"
        command = train_command(recipe, stamps / "run", **options, **places)
        if side == "paceline under torchrun":
            command = torchrun_command("-m", "paceline", *command[1:])
    return watch(command, stamps)


def figures(found: dict[str, Sides]) -> list[Figure]:
    """Compare Paceline's workers with those of the script."""
    hand, fresh, forked = (found[side] for side in _SIDES)
    listed = [
        median_figure(f"peak RSS: {side} / by hand", ratios(own.rss, hand.rss), "x", at_most=1.1)
        for side, own in zip(_SIDES[1:], (fresh, forked), strict=True)
    ]
    for kind in ("pss", "uss"):
        ours, theirs = asdict(forked)[kind], asdict(hand)[kind]
        what = f"{kind.upper()}: paceline train / by hand"
        listed.append(median_figure(what, ratios(ours, theirs), "x"))
    for side in _SIDES:
        sizes = asdict(found[side])
        note = ", ".join(f"{k.upper()} {statistics.median(sizes[k]):.0f}" for k in ("pss", "uss"))
        listed.append(median_figure(f"- peak RSS, {side}", sizes["rss"], "MB", note=note))
    speeds = ratios(forked.images_per_s, hand.images_per_s)
    listed.append(median_figure("speed: paceline train / by hand", speeds, "x"))
    for side in _SIDES:
        listed.append(median_figure(f"- {side}", found[side].images_per_s, "images/s"))
    return listed


def images_per_s(stamps: Path) -> float:
    """Give rank 0's speed from its first step to its last, over both workers."""
    stamp = next(stamp for stamp in read_stamps(stamps) if stamp.rank == 0)
    return (stamp.steps - 1) * _BATCH / (stamp.last_step_s - stamp.first_step_s)


def main() -> int:
    """Measure and report."""
    arguments = parser(__doc__ or "").parse_args()
    rounds, samples = (1, 1280) if arguments.quick else (5, 6400)
    found = {side: Sides() for side in _SIDES}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        directory = Path(scratch)
        write_mnist_shaped(directory, 60_000, 10_000)
        for number in range(rounds):
            for side in _SIDES:
                stamps = directory / f"{number}-{_SIDES.index(side)}"
                workers = run_side(side, directory, stamps, samples)
                sizes = found[side]
                sizes.rss.append(max(worker.rss for worker in workers) / _MB)
                sizes.pss.append(max(worker.pss for worker in workers) / _MB)
                sizes.uss.append(max(worker.uss for worker in workers) / _MB)
                sizes.images_per_s.append(images_per_s(stamps))
    report = Report(name="memory", figures=figures(found))
    report.remarks = [
        "mnist job, two workers of 1 thread, 60,000 images of 28x28 read, one epoch of "
        f"{samples // _BATCH} steps and its evaluation; the larger of the two workers"
    ]
    report.raw = {side: asdict(sizes) for side, sizes in found.items()}
    return report.finish(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
