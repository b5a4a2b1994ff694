"""A real Paceline training that hands the floor over between blocks of steps.

The training runs through `training.loop.train` as always; only its source of batches is wrapped,
and calls back before the first step of every block. What the callback does isn't counted as the
training's time.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import final

from paceline.data.batch import Batch, BatchSource
from paceline.data.memory import TensorData
from paceline.data.order import EpochPlan
from paceline.distributed.device import pick_device, resolve_backend
from paceline.distributed.environment import current_placement
from paceline.distributed.group import Group, joined
from paceline.models.mnist_cnn import MnistCnn
from paceline.options.fields import OptionValue
from paceline.results.run_directory import RunDirectory
from paceline.training.config import TrainConfig
from paceline.training.job import Job
from paceline.training.loop import train
from paceline.training.recipe_session import RecipeTraining, prepare
from paceline.training.rng import seed_everything
from paceline.training.setup import open_session
from paceline.training.status_exchange import StopFlag
from paceline.training.worker import set_up_torch

SEED = 0
MNIST_SETTINGS: Mapping[str, OptionValue] = {
    "epochs": 1_000_000,
    "optimizer": "adadelta",
    "lr": 0.01,
    "seed": SEED,
    "progress": "plain",
}
"""The mnist recipe's, without an end."""


class EnoughError(Exception):
    """Ends a training from within its source of batches."""


@final
class Gate(BatchSource):
    """Serves another source's batches and calls back before each block of steps."""

    def __init__(self, inner: BatchSource, block_steps: int, between: Callable[[], None]) -> None:
        self._inner = inner
        self._block_steps = block_steps
        self._between = between
        self._served = 0

    @property
    def num_samples(self) -> int:
        return self._inner.num_samples

    def train_batches(self, plan: EpochPlan) -> Iterator[Batch]:
        for batch in self._inner.train_batches(plan):
            if self._served % self._block_steps == 0:
                self._between()
            self._served += 1
            yield batch

    def read_ahead(self, plan: EpochPlan) -> None:
        self._inner.read_ahead(plan)

    def eval_batches(self, part: int, parts: int, batch_size: int) -> Iterator[Batch]:
        return self._inner.eval_batches(part, parts, batch_size)

    def describe(self) -> str:
        return self._inner.describe()

    def close(self) -> None:
        self._inner.close()


@contextlib.contextmanager
def worker_group(settings: Mapping[str, OptionValue] = MNIST_SETTINGS) -> Iterator[Group]:
    """Join the process group as a worker of `paceline train` does. Collective."""
    config = TrainConfig.from_settings(settings)
    placement = current_placement()
    device = pick_device(config.dist, placement)
    set_up_torch(config)
    backend = resolve_backend(config.dist, device)
    with joined(placement, device, backend, config.dist.timeout_s) as group:
        yield group


@contextlib.contextmanager
def mnist_training(
    settings: Mapping[str, OptionValue],
    run: RunDirectory,
    data: tuple[TensorData, TensorData],
    group: Group,
) -> Iterator[RecipeTraining]:
    """Set up a training as a worker of `paceline train mnist` does. Collective.

    Args:
        settings: Options that differ from `MNIST_SETTINGS`.
        run: Where it leaves its files; made already.
        data: Training and validation images.
        group: The workers.
    """
    with training_of(
        lambda: Job(model=MnistCnn(), train=data[0], validation=data[1], loss="nll"),
        {**MNIST_SETTINGS, **settings},
        run,
        group,
    ) as training:
        yield training


@contextlib.contextmanager
def training_of(
    build: Callable[[], Job],
    settings: Mapping[str, OptionValue],
    run: RunDirectory,
    group: Group,
) -> Iterator[RecipeTraining]:
    """Set up a training of any job as a worker of `paceline train` does. Collective.

    Args:
        build: Makes the job, once the random streams are seeded.
        settings: Its options.
        run: Where it leaves its files; made already.
        group: The workers.
    """
    config = TrainConfig.from_settings(settings)
    seed_everything(SEED)
    job = build()
    with open_session(config, run, group, StopFlag(under_launcher=True)) as session:
        yield prepare(session, job)


def run_gated(training: RecipeTraining, block_steps: int, between: Callable[[], None]) -> None:
    """Train until the callback raises `EnoughError`; may be repeated. Collective."""
    training.train.source = Gate(training.train.source, block_steps, between)
    training.session.engine.begun = False
    with contextlib.suppress(EnoughError):
        train(training)


@contextlib.contextmanager
def paused(training: RecipeTraining) -> Iterator[None]:
    """Stop the training's own clock, so that it exchanges its status as often as it would alone."""
    started_s = perf_counter()
    yield
    away_s = perf_counter() - started_s
    progress = training.session.engine.context.progress
    progress._lap_from_s += away_s
    progress.data_s -= away_s


@contextlib.contextmanager
def output_to(path: Path) -> Iterator[None]:
    """Send what this worker prints to a file."""
    with path.open("a") as file, contextlib.redirect_stdout(file):
        yield
