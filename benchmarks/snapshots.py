"""What a snapshot every ten steps costs: blocks with and without, in one training.

    python -m benchmarks.snapshots [--quick] [--json FILE]

One Paceline training of the mnist job; from block to block (order ABBA) the option
`snapshot_every_steps` is switched between 10 and none. A block with snapshots ends when its last
one is on disk, so that no writing leaks into a block without.
"""

import json
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from time import perf_counter, process_time, thread_time
from typing import final

from benchmarks.arena import EnoughError, mnist_training, output_to, run_gated, worker_group
from benchmarks.figures import Figure, Report, median_figure, parser, ratios
from benchmarks.mnist_shaped import mnist_shaped
from paceline.checkpoint.format import HostSnapshot, Snapshot
from paceline.launch.local.launcher import launch_local
from paceline.launch.restart_policy import Policy
from paceline.results.run_directory import RunDirectory
from paceline.training.recipe_session import RecipeTraining

WORKERS, BATCH = 2, 64
EVERY = 10
_LEAD = 5
"""Blocks begin this many steps after a step that is due for a snapshot."""
_DROPPED = 2


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to measure; goes to the workers as JSON."""

    pairs: int
    block_steps: int
    directory: str = ""


@dataclass(kw_only=True)
class Measured:
    """Rank 0's seconds of each block, and how long training stood still for each snapshot."""

    with_snapshots: list[float] = field(default_factory=list)
    without: list[float] = field(default_factory=list)
    with_cpu: list[float] = field(default_factory=list)
    without_cpu: list[float] = field(default_factory=list)
    stall: list[float] = field(default_factory=list)
    """All of `Engine.snapshot`: waiting for the others, collecting, copying, handing over."""
    stall_cpu: list[float] = field(default_factory=list)
    """CPU time of the training's thread in it."""
    publish_cpu: list[float] = field(default_factory=list)
    """CPU time of the writing thread: hashing, writing, removing old ones."""
    offer: list[float] = field(default_factory=list)
    """The part of the stall in `SnapshotWriter.offer`: copying and handing over."""
    skipped: int = 0


@final
class Switch:
    """Switches a training's snapshots on and off between blocks."""

    def __init__(self, training: RecipeTraining, plan: Plan) -> None:
        self.measured = Measured()
        self._training = training
        self._pairs = plan.pairs
        self._since: tuple[float, float] | None = None
        self._on = False
        engine = training.session.engine
        self._snapshot = engine.snapshot
        engine.snapshot = self.timed_snapshot  # type: ignore[method-assign]
        writer = engine.snapshots._writer
        if writer is not None:
            self._offer = writer.offer
            writer.offer = self.timed_offer  # type: ignore[method-assign]
            self._publish = writer._store.publish
            setattr(writer._store, "publish", self.timed_publish)  # noqa: B010

    def between(self) -> None:
        """Take the time of the block that ended and set up the next one."""
        measured, training = self.measured, self._training
        if self._since is not None:
            training.session.engine.snapshots.flush()
            wall_s, cpu_s = perf_counter() - self._since[0], process_time() - self._since[1]
            (measured.with_snapshots if self._on else measured.without).append(wall_s)
            (measured.with_cpu if self._on else measured.without_cpu).append(cpu_s)
        done = len(measured.with_snapshots) + len(measured.without)
        if done == 2 * self._pairs:
            measured.skipped = training.session.engine.snapshots.skipped
            raise EnoughError
        self._on = done % 4 in (0, 3)
        every = EVERY if self._on else None
        training.session.engine.context.progress.snapshot_every_steps = every
        training.session.engine.context.group.barrier()
        self._since = perf_counter(), process_time()

    def timed_snapshot(self, *, best: bool = False, must: bool = False) -> None:
        """Take a snapshot, and the time of it."""
        started_s, cpu_s = perf_counter(), thread_time()
        self._snapshot(best=best, must=must)
        self.measured.stall.append(perf_counter() - started_s)
        self.measured.stall_cpu.append(thread_time() - cpu_s)

    def timed_publish(self, host: HostSnapshot, *, best: bool) -> Path:
        """Publish on the writing thread, and take the CPU time of it."""
        cpu_s = thread_time()
        published = self._publish(host, best=best)
        self.measured.publish_cpu.append(thread_time() - cpu_s)
        return published

    def timed_offer(self, snapshot: Snapshot, *, best: bool = False, wait: bool = False) -> bool:
        """Offer, and take the time of it."""
        started_s = perf_counter()
        taken = self._offer(snapshot, best=best, wait=wait)
        self.measured.offer.append(perf_counter() - started_s)
        return taken


def measure(payload: str) -> str:
    """Be one worker. Collective."""
    plan = Plan(**json.loads(payload))
    directory = Path(plan.directory)
    steps = 2 * plan.pairs * plan.block_steps + _LEAD + 1
    data = mnist_shaped(steps * BATCH * WORKERS, seed=1), mnist_shaped(BATCH, seed=2)
    run = RunDirectory.named(directory / "run")
    settings = {"global_batch": WORKERS * BATCH}
    with (
        output_to(directory / "output.txt"),
        worker_group() as group,
        mnist_training(settings, run, data, group) as training,
    ):
        # So that the first block begins off a snapshot.
        training.session.engine.context.progress.state.step = -_LEAD % EVERY
        switch = Switch(training, plan)
        run_gated(training, plan.block_steps, switch.between)
    return json.dumps(asdict(switch.measured))


def run_plan(plan: Plan) -> Measured:
    """Measure on two new workers."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as scratch:
        directory = Path(scratch)
        RunDirectory.named(directory / "run").create()
        outcome = launch_local(
            "benchmarks.snapshots:measure",
            json.dumps(asdict(replace(plan, directory=scratch))),
            workers=WORKERS,
            threads=1,
            policy=Policy(),
            log_dir=directory / "logs",
            progress=lambda: -1,
        )
        if outcome.failures:
            raise RuntimeError(outcome.failures[0].traceback or outcome.failures[0].message)
        return Measured(**json.loads(outcome.results[0]))


def _milliseconds(label: str, seconds: list[float]) -> Figure:
    return median_figure(label, [1e3 * s for s in seconds], "ms")


def main() -> int:
    """Measure and report."""
    arguments = parser(__doc__ or "").parse_args()
    quick: bool = arguments.quick
    plan = Plan(pairs=6, block_steps=20) if quick else Plan(pairs=90, block_steps=40)
    measured = run_plan(plan)
    kept = slice(_DROPPED, None)
    speeds = ratios(measured.without[kept], measured.with_snapshots[kept])
    cpu = ratios(measured.without_cpu[kept], measured.with_cpu[kept])
    first, second = measured.without[1::2], measured.without[2::2]
    same = ratios(first[: len(second)], second)
    report = Report(name="snapshots")
    report.remarks = [
        f"mnist job, {WORKERS} workers of 1 thread, batch {BATCH} each, a snapshot every {EVERY} "
        f"steps against none, blocks of {plan.block_steps} steps in one training; the end of a "
        "block waits for the disk",
        f"{len(measured.stall)} snapshots, {measured.skipped} skipped while one was being written",
    ]
    report.figures = [
        median_figure("images/s with snapshots / without", speeds, "x", at_least=0.98),
        median_figure("- the same by rank 0's CPU time", cpu, "x"),
        median_figure("- A/A: without against without", same, "x"),
        _milliseconds("training stands still for one", measured.stall),
        _milliseconds("- in SnapshotWriter.offer", measured.offer),
        _milliseconds("- CPU time of training's thread", measured.stall_cpu),
        _milliseconds("CPU time of the writing thread for one", measured.publish_cpu),
    ]
    report.raw = asdict(measured)
    return report.finish(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
