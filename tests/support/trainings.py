"""Small trainings on a group of ranks, stopped and gone on with as a test wants it."""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.checkpoint.flatten import flatten_optimizer
from paceline.data.augment import RandomShift
from paceline.data.batch import Batch, BatchSource
from paceline.data.memory import TensorData, synthetic_images
from paceline.data.order import EpochPlan
from paceline.distributed.group import Group
from paceline.errors import InterruptedTraining
from paceline.metrics.console import Advance, Console
from paceline.optim.table import OPTIMIZER_OPTIONS
from paceline.options.fields import OptionValue
from paceline.results.metrics_table import COLUMNS, EpochRow
from paceline.results.run_directory import RunDirectory, SampleUnit
from paceline.training import status_exchange
from paceline.training.config import TrainConfig
from paceline.training.engine import Engine
from paceline.training.job import Job
from paceline.training.loop import train
from paceline.training.recipe_session import prepare
from paceline.training.rng import seed_everything
from paceline.training.run_record.run_metadata import summarize
from paceline.training.setup import open_session
from paceline.training.status_exchange import StopFlag

Settings = Mapping[str, OptionValue]
MakeJob = Callable[[], Job]
TIMED = frozenset({"time_s", "images_per_s", "batch_time_s", "data_time_s"}) | {
    "exposed_comm",
    "waiting",
    "wire_bytes_per_step",  # of one start
}
SIDE = 6


def pictures(samples: int, classes: int = 3, seed: int = 1) -> TensorData:
    """Random one-channel images."""
    return synthetic_images(samples, 1, SIDE, SIDE, classes, seed)


def plain_net(classes: int = 3) -> nn.Module:
    """A network whose loss doesn't depend on how a batch is spread: no BatchNorm, no Dropout."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(SIDE * SIDE, 16), nn.Tanh(), nn.Linear(16, classes)
    )


def noisy_net(classes: int = 3) -> nn.Module:
    """A network with state of its own and random numbers: BatchNorm and Dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(4 * SIDE * SIDE, classes),
    )


def plain_job(samples: int = 50, val_samples: int = 13) -> Job:
    """A job that is the same on any number of workers."""
    return Job(model=plain_net(), train=pictures(samples), validation=pictures(val_samples, seed=2))


def noisy_job(samples: int = 50, val_samples: int = 13) -> Job:
    """A job with everything that a resume has to bring back."""
    return Job(
        model=noisy_net(),
        train=pictures(samples),
        validation=pictures(val_samples, seed=2),
        augment=(RandomShift(1),),
    )


class ListedPictures:
    """A data set of the user's own, with a random transform of each sample."""

    def __init__(self, data: TensorData) -> None:
        self._images, self._labels = data.images.float() / 255, data.labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self._images[index]
        return image + 0.1 * torch.randn_like(image), self._labels[index]


def listed_job(samples: int = 50, val_samples: int = 13) -> Job:
    """A job whose data comes through a DataLoader."""
    train, validation = pictures(samples), pictures(val_samples, seed=2)
    return Job(
        model=noisy_net(),
        train=ListedPictures(train),
        validation=ListedPictures(validation),
        num_classes=3,
    )


def configure(**settings: OptionValue) -> TrainConfig:
    """Options of a short, silent training with a global batch of 8 (the last of 50 samples: 2)."""
    usual: dict[str, OptionValue] = {"epochs": 3, "global_batch": 8, "lr": 0.05}
    usual |= {"progress": "off", "device": "cpu"}
    return TrainConfig.from_settings(usual | settings)


@dataclass(frozen=True, kw_only=True)
class StopAt:
    """When a worker is asked to stop: in its n-th forward pass of a kind (from 1)."""

    rank: int
    forward: int
    training: bool = True


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one worker knows after a training; equal for equal trainings."""

    optimizer: str
    rows: list[dict[str, str]]
    """metrics.csv without times."""
    step: int
    step_in_epoch: int
    epoch: int
    samples_seen: int
    summary: dict[str, object]
    losses: list[float]
    """Mean loss of the epoch so far, after every step of this start."""
    trained: list[tuple[int, list[int]]]
    """(epoch, indices) of every batch of this worker, in this start."""
    evaluated: list[list[int]]
    """Indices of every evaluation of this worker."""
    lines: list[str]
    parameters: list[Tensor]


@dataclass
class RecordingConsole(Console):
    """Keeps what would be shown."""

    lines: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    rows: list[EpochRow] = field(default_factory=list)
    evaluated: list[tuple[str, int, int]] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def warn(self, line: str) -> None:
        self.lines.append(line)

    def is_due(self) -> bool:
        return True

    def advance(self, advance: Advance) -> None:
        self.losses.append(advance.loss)

    def evaluating(self, what: str, done: int, total: int) -> None:
        self.evaluated.append((what, done, total))

    def epoch(self, row: EpochRow, unit: SampleUnit) -> None:
        self.rows.append(row)

    def close(self) -> None:
        pass


@dataclass
class RecordingSource(BatchSource):
    """Keeps the indices of the batches that another source gives."""

    source: BatchSource
    trained: list[tuple[int, list[int]]] = field(default_factory=list)
    evaluated: list[list[int]] = field(default_factory=list)

    @property
    def num_samples(self) -> int:
        return self.source.num_samples

    def train_batches(self, plan: EpochPlan) -> Iterator[Batch]:
        for batch in self.source.train_batches(plan):
            self.trained.append((plan.epoch, batch.indices.tolist()))
            yield batch

    def read_ahead(self, plan: EpochPlan) -> None:
        self.source.read_ahead(plan)

    def eval_batches(self, part: int, parts: int, batch_size: int) -> Iterator[Batch]:
        seen: list[int] = []
        self.evaluated.append(seen)
        for batch in self.source.eval_batches(part, parts, batch_size):
            seen.extend(batch.indices.tolist())
            yield batch

    def describe(self) -> str:
        return self.source.describe()

    def close(self) -> None:
        self.source.close()


def run_training_on(
    group: Group,
    directory: Path,
    make_job: MakeJob,
    config: TrainConfig,
    stop: StopAt | None = None,
) -> Outcome:
    """Train from wherever the run directory stands, exchanging status after every step."""
    # This is a forked process: what is changed here ends with it.
    status_exchange._EVERY_S = 0.0
    os.fsync = _no_wait  # type: ignore[assignment]  # the disk may take as long as it likes
    run = prepared(directory)
    flag = StopFlag(under_launcher=True)
    seed_everything(config.loop.seed)
    job = make_job()
    if stop is not None and stop.rank == group.rank:
        _stop_in_forward(job.model, flag, stop)
    options = tuple(OPTIMIZER_OPTIONS)
    with open_session(config, run, group, flag, own_options=options) as session:
        training = prepare(session, job)
        trained = RecordingSource(training.train.source)
        evaluated = RecordingSource(training.validation.source)
        console = RecordingConsole()
        training.train.source, training.validation.source = trained, evaluated
        engine = session.engine
        engine.context.console = console
        with suppress(InterruptedTraining):
            train(training)
        engine.snapshots.flush()
        return _outcome(engine, run, trained, evaluated, console)


def prepared(directory: Path) -> RunDirectory:
    """Make the directories of a run that the command line makes."""
    run = RunDirectory.named(directory)
    run.snapshots.mkdir(parents=True, exist_ok=True)
    run.logs.mkdir(exist_ok=True)
    return run


def table_without_times(path: Path) -> list[dict[str, str]]:
    """Read metrics.csv without the columns that differ from run to run."""
    header, *lines = path.read_text().splitlines()
    assert header.split(",") == list(COLUMNS)
    rows = [dict(zip(COLUMNS, line.split(","), strict=True)) for line in lines]
    return [{name: cell for name, cell in row.items() if name not in TIMED} for row in rows]


def global_batches(outcomes: list[Outcome]) -> list[list[int]]:
    """Put the workers' shares of each step together, in rank order."""
    steps = zip(*(outcome.trained for outcome in outcomes), strict=True)
    return [[i for _, indices in step for i in indices] for step in steps]


def _no_wait(descriptor: object) -> None:
    """Stand for fsync where no power cut is tested."""


def _stop_in_forward(model: nn.Module, flag: StopFlag, stop: StopAt) -> None:
    counted = 0

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        nonlocal counted
        counted += torch.is_grad_enabled() == module.training == stop.training
        if counted == stop.forward:
            flag.name = "SIGTERM"

    model.register_forward_pre_hook(count)


def _outcome(
    engine: Engine,
    run: RunDirectory,
    trained: RecordingSource,
    evaluated: RecordingSource,
    console: RecordingConsole,
) -> Outcome:
    summary = summarize(engine, "test")
    state = engine.context.progress.state
    return Outcome(
        optimizer=_optimizer_hash(engine),
        rows=table_without_times(run.metrics_csv) if engine.context.group.rank == 0 else [],
        step=state.step,
        step_in_epoch=state.step_in_epoch,
        epoch=state.epoch,
        samples_seen=state.samples_seen,
        summary=summary,
        losses=console.losses,
        trained=trained.trained,
        evaluated=evaluated.evaluated,
        lines=console.lines,
        parameters=[p.detach().clone() for p in engine.context.components.model.parameters()],
    )


def _optimizer_hash(engine: Engine) -> str:
    tensors, scalars = flatten_optimizer(
        engine.context.components.optimizers[0], engine.context.components.model.named_parameters()
    )
    digest = hashlib.sha256(repr(scalars).encode())
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()
