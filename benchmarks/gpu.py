"""Everything that only a GPU can show, in one command: `make gpu`.

    python -m benchmarks.gpu [--minutes 20] [--output build/gpu] [--only WORDS] [--quick] [--check]

The tests that need a GPU; the same bits on 1, 2 and 4 workers that share one; images/s and peak
memory against a loop written by hand with the same options, on one GPU and on all, and against a
DDP article's loop; what `--shards` costs; recovery after killed workers.
The table (OUTPUT.md) and every measurement (OUTPUT.json) are written anew after each part: what was
measured is kept, whenever it is stopped, and `--only` measures the rest.
"""

import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import final

import torch

from benchmarks import restarts, same_bits
from benchmarks.commands import ROOT, WORKERS, ends_with_us
from benchmarks.figures import Figure, Report, median_figure, parser, ratios
from benchmarks.gpu_sides import Case, Side
from paceline.files import write_atomic

SHARDS = (1, 2, 4, 8, 16)
QUICK_SHARDS = (4,)
"""Of the small batches of `--quick`: BatchNorm needs two samples a shard."""
_SHARING = (1, 2, 4)
NETWORKS: Sequence[Case] = (
    Case(by="paceline", network="resnet50", batch=128, size=224, block_steps=4, epoch_steps=24),
    Case(by="paceline", network="wideresnet", batch=256, size=32, block_steps=6, epoch_steps=48),
    Case(by="paceline", network="transformer", batch=64, size=224, block_steps=4, epoch_steps=24),
)
_ARTICLE = Case(
    by="paceline",
    network="mnist",
    precision="fp32",
    batch=64,
    size=28,
    block_steps=20,
    epoch_steps=200,
)
_DROPPED, _LEAST_PAIRS = 2, 6
_MOST_OF_ERROR = 200
"""Characters of it in the table; the JSON has it whole."""
_EXPLAINED = (
    "x: images/s of Paceline over the other's in paired blocks by turns (ABBA), each side in "
    "processes of its own; by hand: the same options, fused SGD, data on the GPU, DDP"
)
_PAIRS_S, _MINUTES = 10.0, 20.0
"""Seconds that two sides are compared for, in a run of so many minutes."""


@final
@dataclass(kw_only=True)
class Blocks:
    """Seconds of each block of two sides, and what they took of the GPU's memory."""

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    ours_bytes: int = 0
    theirs_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of the report."""

    title: str
    measure: Callable[[Report], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much is measured, and where."""

    gpus: int
    minutes: float
    quick: bool
    scratch: Path

    @property
    def pairs_s(self) -> float:
        """Seconds of comparing two sides."""
        return 0.0 if self.quick else _PAIRS_S * self.minutes / _MINUTES

    def parts(self) -> Iterator[Part]:
        """List what is measured, what matters most first."""
        yield Part(title="GPU tests", measure=self.run_tests)
        yield Part(title="same bits on a shared GPU", measure=self.same_bits)
        networks = [case.tried_out() if self.quick else case for case in NETWORKS]
        for workers in sorted({1, self.gpus}):
            for case in networks:
                where = "1 GPU" if workers == 1 else f"{workers} GPUs"
                title = f"{case.network}, bf16, {where} / the same by hand"
                yield self._against(title, case, replace(case, by="hand"), workers)
        article = _ARTICLE.tried_out() if self.quick else _ARTICLE
        theirs = replace(article, by="article")
        yield self._against("mnist, fp32, 1 GPU / article's loop", article, theirs, 1)
        yield Part(title="recovery", measure=self.recover)
        for shards in QUICK_SHARDS if self.quick else SHARDS:
            for case in networks:
                title = f"{case.network}, bf16, --shards {shards} / without"
                yield self._against(title, replace(case, shards=shards), case, 1)

    def _against(self, title: str, ours: Case, theirs: Case, workers: int) -> Part:
        def measure(report: Report) -> None:
            blocks = contest(ours, theirs, workers, self.pairs_s, self.scratch)
            report.raw[title] = asdict(blocks)
            report.figures += figures_of(title, ours, workers, blocks)

        return Part(title=title, measure=measure)

    def run_tests(self, report: Report) -> None:
        """Run the tests that need a GPU."""
        found = self.scratch / "tests.xml"
        options = ("-q", "-n", "4", "-m", "gpu", f"--junitxml={found}")
        words = [sys.executable, "-m", "pytest", *options, "tests"]
        if self.quick:
            words[-1] = "tests/optim"
        done = subprocess.run(
            words,
            cwd=ROOT,
            preexec_fn=ends_with_us(),
            capture_output=True,
            text=True,
            check=False,
        )
        last = done.stdout.strip().rpartition("\n")[2]
        failed = done.returncode != 0
        report.figures.append(
            Figure(
                what="GPU tests: some failed (1 = yes)",
                value=float(failed),
                unit="",
                at_most=0,
                note=last,
            )
        )
        report.raw["GPU tests"] = done.stdout[-20_000:]

    def same_bits(self, report: Report) -> None:
        """Train on several workers that share a GPU, and by NCCL on all GPUs."""
        sharing = {"device": "cuda", "backend": "gloo"}
        line, epochs = next(iter(same_bits.LINES)), 1 if self.quick else 5
        numbers = _SHARING[:2] if self.quick else _SHARING
        cells = [same_bits.trained(line, n, epochs, sharing) for n in numbers]
        if self.gpus > 1:
            cells.append(same_bits.trained(line, self.gpus, epochs, {"device": "cuda"}))
        report.raw["same bits"] = [asdict(cell) for cell in cells]
        over = f" that share a GPU{f', {self.gpus} with one each' if self.gpus > 1 else ''}"
        report.figures.append(
            Figure(
                what=f"different bits: {', '.join(map(str, numbers))} workers{over}",
                value=len({cell.bits for cell in cells}),
                unit="",
                count=len(cells),
                at_most=1,
                note=f"{line}; weights {cells[0].weights_sha256[:8]}",
            )
        )

    def recover(self, report: Report) -> None:
        """Kill workers; the training goes on and ends with the same weights."""
        options: dict[str, object] = {"device": "cuda", "shards": 4}
        if self.gpus < WORKERS:
            options["backend"] = "gloo"
        kills = 1 if self.quick else 3
        epochs = 3 * kills
        wanted = restarts.undisturbed(self.scratch / "undisturbed", epochs, options)
        found = restarts.disturbed(self.scratch / "disturbed", epochs, kills, 0, options)
        same = float(found.weights_sha256 == wanted)
        back = [kill.back_s for kill in found.kills]
        report.raw["recovery"] = asdict(found)
        report.figures += [
            Figure(what="recovery: same weights (1 = yes)", value=same, unit="", at_least=1),
            median_figure("- killed to the first step of new workers", back, "s"),
        ]


def contest(ours: Case, theirs: Case, workers: int, seconds: float, scratch: Path) -> Blocks:
    """Have two sides take blocks of steps by turns (ABBA)."""
    blocks = Blocks()
    with ExitStack() as stack:
        us, them = (stack.enter_context(Side(case, workers, scratch)) for case in (ours, theirs))
        us.wait()
        them.wait()
        until_s = monotonic() + seconds
        while len(blocks.ours) < _DROPPED + _LEAST_PAIRS or monotonic() < until_s:
            sides = [(us, blocks.ours), (them, blocks.theirs)]
            for side, seconds_of in sides if len(blocks.ours) % 2 == 0 else reversed(sides):
                seconds_of.append(side.block())
        blocks.ours_bytes, blocks.theirs_bytes = us.peak_bytes(), them.peak_bytes()
    return blocks


def figures_of(title: str, case: Case, workers: int, blocks: Blocks) -> list[Figure]:
    """Summarise a contest: of the first blocks and of those that end an epoch nothing is said."""
    each = case.epoch_steps // case.block_steps
    steady = [i for i in range(_DROPPED, len(blocks.ours)) if (i + 1) % each]
    ours, theirs = ([side[i] for i in steady] for side in (blocks.ours, blocks.theirs))
    samples = case.block_steps * case.batch * workers
    speeds = [statistics.median(samples / s for s in side) for side in (ours, theirs)]
    figure = Figure(
        what="- peak memory",
        value=blocks.ours_bytes / blocks.theirs_bytes if blocks.theirs_bytes else 0.0,
        unit="x",
        note=f"{blocks.ours_bytes / 1e9:.2f} against {blocks.theirs_bytes / 1e9:.2f} GB",
    )
    note = f"{speeds[0]:,.0f} against {speeds[1]:,.0f} images/s"
    return [median_figure(title, ratios(theirs, ours), "x", note=note), figure]


def measure_all(
    parts: Sequence[Part], minutes: float, report: Report, save: Callable[[], None]
) -> bool:
    """Measure part by part while there is time; tells whether all went well.

    Args:
        parts: What there is to measure.
        minutes: After these none is begun.
        report: Where it goes.
        save: Called whenever the report has changed.
    """
    until_s, went_well = monotonic() + 60 * minutes, True
    for number, part in enumerate(parts):
        missing = f"not measured: {'; '.join(left.title for left in parts[number:])}"
        is_up = monotonic() > until_s
        report.remarks.append(f"the time was up; {missing}" if is_up else missing)
        save()
        if is_up:
            return went_well
        print(f"{part.title} ...", file=sys.stderr, flush=True)
        try:
            part.measure(report)
        except (RuntimeError, OSError) as error:
            went_well = False
            first = str(error).partition("\n")[0][:_MOST_OF_ERROR]
            report.remarks.insert(-1, f"{part.title}: failed: {first}")
            report.raw[f"{part.title}: failed"] = str(error)
        report.remarks.remove(missing)
    save()
    return went_well


def main() -> int:
    """Measure what the time allows."""
    made = parser(__doc__ or "")
    made.add_argument("--minutes", type=float, default=_MINUTES, help="begin nothing after these")
    made.add_argument("--output", type=Path, default=Path("build/gpu"), help="without .md, .json")
    made.add_argument("--only", default="", metavar="WORDS", help="parts whose title has these")
    arguments = made.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus:
        print("benchmarks.gpu: there is no GPU that PyTorch can use here", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that sides are ended
    report = Report(name="gpu", remarks=[_EXPLAINED])
    arguments.output.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        for suffix, text in ((".md", f"{report.as_markdown()}\n"), (".json", report.as_json())):
            write_atomic(arguments.output.with_suffix(suffix), text.encode())

    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        plan = Plan(
            gpus=gpus, minutes=arguments.minutes, quick=arguments.quick, scratch=Path(scratch)
        )
        try:
            parts = [part for part in plan.parts() if arguments.only in part.title]
            went_well = measure_all(parts, arguments.minutes, report, save)
        except KeyboardInterrupt:
            save()
            print(f"stopped; what was measured is in {arguments.output}.md", file=sys.stderr)
            return 130
    code = report.finish(arguments)
    print(f"\nwritten to {arguments.output}.md and .json", file=sys.stderr)
    return code if went_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
