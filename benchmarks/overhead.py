"""Paceline's training against loops written by hand, in interleaved blocks of one process group.

    python -m benchmarks.overhead [--quick] [--only WORDS] [--pairs N] [--json FILE]

Paceline trains as `paceline train mnist` does, with counting, progress lines and snapshots on. The
opponent runs as many steps right after or before each of its blocks (order ABBA), in the same two
processes. A snapshot in flight is waited for, in Paceline's time, before the opponent runs.
"""

import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Literal, final

import torch

from benchmarks.arena import (
    SEED,
    EnoughError,
    mnist_training,
    output_to,
    paused,
    run_gated,
    worker_group,
)
from benchmarks.figures import (
    Report,
    has_amx,
    median_figure,
    parser,
    ratios,
)
from benchmarks.loops import HandLoop, Workers, article_loop, tuned_loop
from benchmarks.mnist_shaped import mnist_shaped, write_mnist_shaped
from paceline.launch.local.launcher import launch_local
from paceline.launch.restart_policy import Policy
from paceline.models.mnist_cnn import MnistCnn
from paceline.results.run_directory import RunDirectory
from paceline.training.recipe_session import RecipeTraining
from paceline.training.rng import seed_everything

WORKERS, BATCH = 2, 64
_DROPPED = 2
_EQUAL = 1e-6
_TEST_SAMPLES = 2048
_CLOSE = "fp32 / tuned loop in fp32"
"""The match that needs the most pairs, its gate being close to 1."""


Opponent = Literal["tuned", "article", "alone"]
"""`alone`: the tuned loop in processes that never talk to each other."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """What is compared, and how long; goes to the workers as JSON."""

    title: str
    opponent: Opponent
    ours: Literal["fp32", "bf16"]
    theirs: Literal["fp32", "bf16"]
    at_least: float | None
    pairs: int
    block_steps: int
    epoch_steps: int
    shards: int | None = None
    """Of Paceline's training."""
    directory: str = ""


@dataclass(kw_only=True)
class Blocks:
    """Rank 0's seconds of each block, in order: of the clock, and of the process's CPU time.

    Of the opponent `alone`, `theirs` is the harmonic mean of both ranks' seconds.
    """

    ours: list[float] = field(default_factory=list)
    theirs: list[float] = field(default_factory=list)
    ours_cpu: list[float] = field(default_factory=list)
    theirs_cpu: list[float] = field(default_factory=list)
    closing: list[bool] = field(default_factory=list)
    """Whether the block ended an epoch: evaluation, and Paceline's snapshot, are in it."""
    difference: float | None = None
    """Largest relative difference of a weight after the first pair, where they should be equal."""


@final
class Contest:
    """Runs the opponent's blocks between those of a training."""

    def __init__(self, training: RecipeTraining, opponent: HandLoop, match: Match) -> None:
        self.blocks = Blocks()
        self._training = training
        self._opponent = opponent
        self._match = match
        self._since: tuple[float, float] | None = None

    def between(self) -> None:
        """Take the time of the block that ended, and let the opponent run where it is its turn."""
        blocks, training = self.blocks, self._training
        if self._since is None:
            self._since = self._floor()
            return
        hand_over = len(blocks.ours) % 2 == 0
        if hand_over:
            training.session.engine.snapshots.flush()
        now = perf_counter(), process_time()
        blocks.ours.append(now[0] - self._since[0])
        blocks.ours_cpu.append(now[1] - self._since[1])
        steps = len(blocks.ours) * self._match.block_steps
        blocks.closing.append(steps % self._match.epoch_steps == 0)
        self._since = now
        if hand_over:
            with paused(training):
                self._their_block()
                if len(blocks.ours) == 1:
                    self._compare()
                self._their_block()
                self._since = self._floor()
        elif len(blocks.ours) >= self._match.pairs:
            raise EnoughError

    def _their_block(self) -> None:
        since = self._floor()
        for _ in range(self._match.block_steps):
            next(self._opponent.steps)
        self.blocks.theirs.append(perf_counter() - since[0])
        self.blocks.theirs_cpu.append(process_time() - since[1])

    def _floor(self) -> tuple[float, float]:
        self._training.session.engine.context.group.barrier()
        return perf_counter(), process_time()

    def _compare(self) -> None:
        if self._match.opponent != "tuned" or self._match.ours != self._match.theirs:
            return
        ours, theirs = self._training.model.state_dict(), self._opponent.model.state_dict()
        difference = max(_relative(ours[name].double(), theirs[name].double()) for name in ours)
        if not difference <= _EQUAL:
            raise AssertionError(f"the two trainings differ by {difference:g}")
        self.blocks.difference = difference


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def contest(payload: str) -> str:
    """Be one worker of a match. Collective."""
    match = Match(**json.loads(payload))
    directory = Path(match.directory)
    data = (
        mnist_shaped(match.epoch_steps * BATCH * WORKERS, seed=1),
        mnist_shaped(_TEST_SAMPLES, seed=2),
    )
    settings = {"global_batch": WORKERS * BATCH, "precision": match.ours, "shards": match.shards}
    run = RunDirectory.named(directory / "run")
    with (
        output_to(directory / "output.txt"),
        worker_group() as group,
        mnist_training(settings, run, data, group) as training,
    ):
        who = Workers(rank=group.rank, world_size=WORKERS, batch=BATCH)
        seed_everything(SEED)
        if match.opponent == "article":
            opponent = article_loop(directory, who)
        elif match.opponent == "tuned":
            opponent = tuned_loop(*data, who, bf16=match.theirs == "bf16")
        else:
            own = [
                replace(
                    part,
                    images=part.images[group.rank :: WORKERS],
                    labels=part.labels[group.rank :: WORKERS],
                )
                for part in data
            ]
            opponent = tuned_loop(own[0], own[1], replace(who, rank=0, world_size=1))
        found = Contest(training, opponent, match)
        run_gated(training, match.block_steps, found.between)
    return json.dumps(asdict(found.blocks))


def play(match: Match) -> Blocks:
    """Run a match on two new workers."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        directory = Path(scratch)
        RunDirectory.named(directory / "run").create()
        if match.opponent == "article":
            write_mnist_shaped(directory, match.epoch_steps * BATCH * WORKERS, _TEST_SAMPLES)
        outcome = launch_local(
            "benchmarks.overhead:contest",
            json.dumps(asdict(replace(match, directory=scratch))),
            workers=WORKERS,
            threads=1,
            policy=Policy(),
            log_dir=directory / "logs",
            progress=lambda: -1,
        )
        if outcome.failures:
            raise RuntimeError(outcome.failures[0].traceback or outcome.failures[0].message)
        ranks = [Blocks(**json.loads(outcome.results[rank])) for rank in range(WORKERS)]
        if match.opponent == "alone":
            # What they do together: each goes at its own speed.
            pairs = zip(*(blocks.theirs for blocks in ranks), strict=True)
            ranks[0].theirs = [statistics.harmonic_mean(seconds) for seconds in pairs]
        return ranks[0]


def add_match(report: Report, match: Match, blocks: Blocks) -> None:
    """Put a match's figures into the report."""
    steady = [i for i, closing in enumerate(blocks.closing) if not closing and i >= _DROPPED]
    ours, theirs, ours_cpu, theirs_cpu = (
        [side[i] for i in steady]
        for side in (blocks.ours, blocks.theirs, blocks.ours_cpu, blocks.theirs_cpu)
    )
    samples = match.block_steps * WORKERS * BATCH
    note = "" if blocks.difference is None else f"weights differ by {blocks.difference:.1g}"
    same = steady_neighbours(blocks)
    report.figures += [
        median_figure(match.title, ratios(theirs, ours), "x", at_least=match.at_least, note=note),
        median_figure("- the same by rank 0's CPU time", ratios(theirs_cpu, ours_cpu), "x"),
        median_figure("- Paceline", [samples / s for s in ours], "images/s"),
        median_figure("- by hand", [samples / s for s in theirs], "images/s"),
        median_figure("- A/A: by hand against itself", ratios(same[0::2], same[1::2]), "x"),
    ]
    whole = sum(blocks.theirs[_DROPPED:]) / sum(blocks.ours[_DROPPED:])
    report.remarks.append(
        f"{match.title}: {whole:.3f} x over all blocks together, "
        f"{sum(blocks.closing[_DROPPED:])} ends of epochs with evaluation and snapshot included"
    )
    report.raw[match.title] = asdict(blocks) | {"match": asdict(match)}


def steady_neighbours(blocks: Blocks) -> Sequence[float]:
    """Give the opponent's blocks that ran one right after the other, two by two."""
    firsts = range(_DROPPED, len(blocks.theirs) - 1, 2)
    kept = [i for i in firsts if not any(blocks.closing[i : i + 2])]
    return [blocks.theirs[j] for i in kept for j in (i, i + 1)]


def matches(quick: bool) -> list[Match]:
    """List what is compared."""
    block_steps, epoch_steps = (3, 12) if quick else (8, 96)
    amx = 2.2 if has_amx() else None
    rows: list[tuple[str, Opponent, Literal["fp32", "bf16"], float | None]] = [
        (_CLOSE, "tuned", "fp32", 0.98),
        ("fp32 / isolated processes", "alone", "fp32", 0.95),
        ("fp32 with --shards 2 / isolated processes", "alone", "fp32", 0.95),
        ("fp32 / article's loop in fp32", "article", "fp32", 1.5),
        ("bf16 / article's loop in fp32", "article", "bf16", amx),
        ("bf16 / tuned loop in bf16", "tuned", "bf16", None),
    ]
    return [
        Match(
            title=title,
            opponent=opponent,
            ours=ours,
            theirs=ours if opponent == "tuned" else "fp32",
            shards=2 if "--shards 2" in title else None,
            at_least=gate,
            pairs=8 if quick else 120 if title == _CLOSE or opponent == "alone" else 32,
            block_steps=block_steps,
            epoch_steps=epoch_steps,
        )
        for title, opponent, ours, gate in rows
    ]


def main() -> int:
    """Run the matches."""
    made = parser(__doc__ or "")
    made.add_argument("--only", default="", metavar="WORDS", help="matches whose title has these")
    made.add_argument("--pairs", type=int, help="pairs of blocks of each match")
    arguments = made.parse_args()
    report = Report(name="overhead")
    report.remarks = [
        f"{MnistCnn.__name__}, Adadelta, {WORKERS} workers of 1 thread, batch {BATCH} each; "
        "images/s of Paceline over the other's, median of paired blocks",
        "the article's loop: torchvision MNIST from IDX files, ToTensor and Normalize by sample, "
        "DistributedSampler, DataLoader with num_workers=0, contiguous format, DDP(model)",
    ]
    for listed in matches(arguments.quick):
        if arguments.only not in listed.title:
            continue
        match = replace(listed, pairs=arguments.pairs or listed.pairs)
        blocks = play(match)
        add_match(report, match, blocks)
        print(
            f"{match.title}: {statistics.median(ratios(blocks.theirs, blocks.ours)):.3f}",
            flush=True,
        )
    return report.finish(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
