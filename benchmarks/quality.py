"""What each way of combining gradients costs in accuracy: real trainings at the same samples.

    python -m benchmarks.quality [--quick] [--only WORDS] [--lines FILE] [--json FILE]

Eight workers on this machine, one thread each, train to the end with each method and seed; the
test accuracy is that of the last epoch. Every finished training is a line in FILE, and isn't
repeated where the file holds it: the run can be stopped and gone on with.
"""

import argparse
import json
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import sqrt
from pathlib import Path
from typing import cast

from benchmarks.distorted import distorted_job
from benchmarks.figures import Figure, Report, markdown, parser
from benchmarks.fleet import Answer, Fleet, Seat, fleet
from benchmarks.trials import Settings, opened
from paceline.recipes.digits import digits
from paceline.results.run_directory import RunDirectory
from paceline.training.job import Job
from paceline.training.losses import as_scores
from paceline.training.recipe_session import RecipeTraining, prepare

WORKERS = 8
SEEDS = 5
METHODS: Mapping[str, Settings] = {
    "all-reduce": {"sync": "allreduce"},
    "bf16": {"sync": "bf16"},
    "PowerSGD": {"sync": "powersgd"},
    "local": {"sync": "local"},
    "DiLoCo": {"sync": "diloco"},
}
"""With the defaults of each but for what `OWN` says."""
OWN: Mapping[tuple[str, str], Settings] = {
    ("digits", "local"): {"lr": 0.02},
    ("digits", "DiLoCo"): {"lr": 0.0125},
    ("distorted digits", "DiLoCo"): {"lr": 0.025},
}
"""Where a worker's own step needs a lower rate: it sees an eighth of the batch (8 images of
`digits`), and DiLoCo's momentum adds to it. Chosen on seeds that aren't counted."""
PLAIN, RECOMMENDED = "all-reduce", "PowerSGD"
"""What others are compared with, and what is recommended for slow links."""
MOST_LOST = 0.3
"""Points of accuracy that the recommended method may lose."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned."""

    job: Callable[[], Job]
    settings: Settings


TASKS: Mapping[str, Task] = {
    "digits": Task(
        job=digits, settings={**digits.settings, "target_accuracy": None, "patience": 1}
    ),
    "distorted digits": Task(
        job=distorted_job,
        settings={
            "epochs": 8,
            "global_batch": 128,
            "optimizer": "sgd",
            "lr": 0.1,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 5e-4,
            "schedule": "cosine",
            "warmup_epochs": 1.0,
        },
    ),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training that is to be done; what names it in the file."""

    task: str
    method: str
    seed: int
    workers: int
    settings: Settings

    def key(self) -> str:
        """Tell it from others: also from one with other settings."""
        return json.dumps(asdict(self), sort_keys=True)


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a training ended."""

    accuracy: float
    loss: float
    steps: int
    samples: int
    seconds: float


def wanted(tasks: Sequence[str], seeds: int, only: str, epochs: int | None) -> list[Run]:
    """List the trainings, seed by seed, so that a part of them is a fair comparison as well."""
    more: Settings = {} if epochs is None else {"epochs": epochs}
    return [
        Run(
            task=task,
            method=method,
            seed=seed,
            workers=WORKERS,
            settings={
                **TASKS[task].settings,
                **more,
                **settings,
                **OWN.get((task, method), {}),
                "seed": seed,
            },
        )
        for seed in range(seeds)
        for task in tasks
        for method, settings in METHODS.items()
        if method == PLAIN or only in f"{task}, {method}"
    ]


def read_lines(path: Path | None) -> dict[str, Result]:
    """Read what has been trained already."""
    if path is None or not path.exists():
        return {}
    lines = map(json.loads, path.read_text().splitlines())
    return {Run(**line["training"]).key(): Result(**line["result"]) for line in lines}


def train_all(trainings: Sequence[Run], path: Path | None) -> Iterator[tuple[Run, Result]]:
    """Do what hasn't been done yet; each is in the file before the next one begins."""
    known = read_lines(path)
    with fleet(WORKERS, serve) as workers:
        for number, training in enumerate(trainings):
            found = known.get(training.key())
            if found is None:
                found = train_one(training, workers, f"training-{number}")
                if path is not None:
                    line = {"training": asdict(training), "result": asdict(found)}
                    with path.open("a") as file:
                        file.write(json.dumps(line) + "\n")
                name = f"{training.task}, {training.method}, seed {training.seed}"
                print(f"{name}: {found.accuracy:.2%} in {found.seconds:.0f} s", flush=True)
            yield training, found


def train_one(training: Run, workers: Fleet, name: str) -> Result:
    """Train on all workers."""
    directory = RunDirectory.named(workers.scratch / name)
    directory.create()
    began_s = time.perf_counter()
    request = {
        "task": training.task,
        "settings": training.settings,
        "workers": training.workers,
        "meeting": workers.meeting(),
        "run_dir": str(directory.path),
    }
    answer = workers.ask([request] * training.workers, limit_s=900.0)[0]
    told = cast(dict[str, float], answer)
    return Result(
        accuracy=told["accuracy"],
        loss=told["loss"],
        steps=int(told["steps"]),
        samples=int(told["samples"]),
        seconds=time.perf_counter() - began_s,
    )


def serve(seat: Seat, request: Mapping[str, object]) -> Answer:
    """Train, in the worker."""
    settings = cast(Settings, request["settings"])
    number, run_dir = cast(int, request["workers"]), Path(str(request["run_dir"]))
    with opened(seat, number, str(request["meeting"]), run_dir, settings) as s:
        training = prepare(s, TASKS[str(request["task"])].job())
        figures = _trained(training, s.config.loop.epochs)
        s.engine.snapshots.flush()
        state = s.engine.context.progress.state
        return {
            "accuracy": figures["accuracy"],
            "loss": figures["loss"],
            "steps": state.step,
            "samples": state.samples_seen,
        }


def _trained(t: RecipeTraining, epochs: int) -> dict[str, float]:
    """Train as `trainer.loop.train` does; judged at the end alone."""
    figures: dict[str, float] = {}
    for epoch in t.session.epochs():
        for batch in t.train.batches():
            inputs, targets = batch.pair()
            outputs = as_scores(t.model(inputs))
            t.session.step(t.loss(outputs, targets), outputs=outputs, targets=targets)
        if epoch == epochs - 1:
            figures = t.session.evaluate(t.evaluate_batch, t.validation)
    return figures


def judge(results: Sequence[tuple[Run, Result]]) -> list[Figure]:
    """Compare each method with all-reduce, seed by seed."""
    figures = []
    for task, method in places(results):
        off = difference(results, task, method)
        if method != PLAIN:
            figures.append(
                Figure(
                    what=f"{task}: {method}, against {PLAIN}",
                    value=statistics.mean(off),
                    unit="points",
                    low=min(off),
                    high=max(off),
                    count=len(off),
                    at_least=-MOST_LOST if method == RECOMMENDED else None,
                    note=f"mean; standard error {_deviation(off) / sqrt(len(off)):.2f}",
                )
            )
    return figures


def places(results: Sequence[tuple[Run, Result]]) -> list[tuple[str, str]]:
    """List the tasks and methods."""
    return list(dict.fromkeys((run.task, run.method) for run, _ in results))


def points(results: Sequence[tuple[Run, Result]], task: str, method: str) -> dict[int, float]:
    """Give the accuracies in percent, by seed."""
    return {r.seed: 100 * f.accuracy for r, f in results if (r.task, r.method) == (task, method)}


def difference(results: Sequence[tuple[Run, Result]], task: str, method: str) -> list[float]:
    """Subtract all-reduce's accuracies, in points."""
    plain = points(results, task, PLAIN)
    return [value - plain[seed] for seed, value in points(results, task, method).items()]


def table(results: Sequence[tuple[Run, Result]]) -> str:
    """Show the accuracies by task and method."""
    rows = []
    for task, method in places(results):
        own = list(points(results, task, method).values())
        samples = {f.samples for r, f in results if (r.task, r.method) == (task, method)}
        rows.append(
            (
                task,
                method,
                f"{statistics.mean(own):.2f} %",
                f"{_deviation(own):.2f}",
                f"{min(own):.2f}-{max(own):.2f}",
                ", ".join(f"{number:,}" for number in samples),
                str(len(own)),
            )
        )
    return markdown(_HEADER, rows)


_HEADER = ("task", "method", "test accuracy", "deviation", "least-most", "samples", "seeds")


def _deviation(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def planned(arguments: argparse.Namespace) -> list[Run]:
    """List what is to be trained by the command line."""
    if arguments.quick:
        return wanted(["digits"], 1, arguments.only, 2)
    return wanted(list(TASKS), arguments.seeds, arguments.only, None)


def main() -> int:
    """Train what is missing, and show all of it."""
    about = parser(__doc__ or "")
    about.add_argument("--seeds", type=int, default=SEEDS)
    about.add_argument("--only", default="", help="tasks and methods with these words")
    about.add_argument("--lines", type=Path, metavar="FILE", help="what is trained; to go on with")
    arguments = about.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    report = Report(name="quality")
    report.remarks.append(
        f"{WORKERS} workers of one thread on this machine; each method with its defaults (and a "
        "rate of its own where OWN has one), the same seeds, the same number of samples; "
        "differences are of the same seed"
    )
    results = list(train_all(planned(arguments), arguments.lines))
    report.raw = {training.key(): asdict(result) for training, result in results}
    report.figures = judge(results)
    status = report.finish(arguments)
    print("\n" + table(results))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
