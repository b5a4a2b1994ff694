"""Every hook around a training's steps: one table for all; and what an observer sees."""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path

import pytest
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline import training
from paceline.data.batch import Batch
from paceline.distributed.group import Group
from paceline.errors import InterruptedTraining
from paceline.optim.schedule import Schedule
from paceline.options.fields import OptionValue
from paceline.training.hooks.base import StepHook, StepHooks
from paceline.training.hooks.learning_rate import LearningRateSchedule
from paceline.training.hooks.metrics_logger import MetricsLogger
from paceline.training.hooks.observer import OBSERVER
from paceline.training.hooks.step_checks import (
    LoopChecks,
    RareReplicaChecks,
    ReplicaChecks,
    ReproducibilityChecks,
    StreamChecks,
    SubsetChecks,
)
from paceline.training.optimizer_step import OptimizerStep
from paceline.training.status_exchange import StopFlag
from tests.support.ranks import run_ranks
from tests.support.sessions import (
    assert_weights,
    net,
    pair_of,
    points,
    session_on,
    sgd,
    weights_of,
)

TABLE: Mapping[type[StepHook], Mapping[str, OptionValue]] = {
    LearningRateSchedule: {},
    MetricsLogger: {},
    LoopChecks: {},
    StreamChecks: {},
    SubsetChecks: {},
    RareReplicaChecks: {},
    ReplicaChecks: {"check_every": 2},
    ReproducibilityChecks: {"shards": 2},
    OptimizerStep: {"precision": "fp16"},
}
"""With what options a training has it."""
EPOCHS, STOP = 2, 4
"""Of 7 steps; a signal comes in the first epoch."""


def methods_of(hooks: StepHooks) -> Iterator[object]:
    """List whose methods are called."""
    for methods in vars(hooks).values():
        yield from (type(getattr(method, "__self__", None)) for method in methods)


def train(
    group: Group, directory: Path, settings: Mapping[str, OptionValue], stop: int | None
) -> tuple[set[object], list[Tensor]]:
    """Train to the end, or to a signal; returns the hooks and the weights."""
    flag = StopFlag(under_launcher=True)
    with suppress(InterruptedTraining), session_on(group, directory, settings, flag) as s:
        model = s.model(net())
        optimizer = s.optimizer(sgd(model))
        rates = [group["lr"] for group in optimizer.param_groups]
        schedule = Schedule(kind="cosine", total_steps=14, steps_per_epoch=7)
        s.engine.context.hooks.add(LearningRateSchedule(optimizer, rates, schedule))
        batches = s.loader(TensorDataset(*points()), global_batch=8)
        for _ in s.epochs(EPOCHS):
            for batch in batches:
                s.step(F.cross_entropy(model(pair_of(batch)[0]), pair_of(batch)[1]))
                if s.engine.context.progress.state.step == stop:
                    flag.name = "SIGTERM"
    s.engine.snapshots.flush()
    return set(methods_of(s.engine.context.hooks)), weights_of(model)


@pytest.mark.ranks
@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.__name__)
@pytest.mark.core_cases(3)
def test_with_each_a_resumed_training_ends_as_an_uninterrupted_one(
    kind: type[StepHook], tmp_path: Path
) -> None:
    settings = TABLE[kind]
    whole = run_ranks(2, train, tmp_path / "whole", settings, None)
    run_ranks(2, train, tmp_path / "parted", settings, STOP)
    parted = run_ranks(2, train, tmp_path / "parted", settings, None)
    for (hooks, weights), (_, expected) in zip(parted, whole, strict=True):
        assert kind in hooks
        assert_weights(weights, expected)
    rows = [
        (tmp_path / name / "metrics.csv").read_text().splitlines() for name in ("whole", "parted")
    ]
    assert len(rows[0]) == len(rows[1]) == 1 + EPOCHS


def test_the_table_has_them_all() -> None:
    for module in pkgutil.walk_packages(training.__path__, "paceline.training."):
        importlib.import_module(module.name)
    found = {
        kind for kind in StepHook.__subclasses__() if kind.__module__.startswith("paceline.tr")
    }
    assert found == {*TABLE}


class Recording:
    """Notes what is called, and ends epochs after a step."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def begin(self, models: Mapping[str, nn.Module]) -> None:
        self.calls.append(("begin", list(models)))

    def epoch(self, number: int, batches: Iterator[Batch]) -> Iterator[Batch]:
        self.calls.append(("epoch", number))
        yield from islice(batches, 1)

    def batch(self, epoch: int, batch: Batch) -> None:
        self.calls.append(("batch", epoch, batch.local))

    def backward(self, loss: Tensor, weight: float) -> None:
        self.calls.append(("backward", weight))

    def evaluated(self, metrics: Mapping[str, float], samples: int) -> None:
        self.calls.append(("evaluated", dict(metrics), samples))


def record(group: Group, directory: Path) -> list[object]:
    """Train two epochs, each step in two pieces; returns what an observer sees."""
    observer = Recording()
    OBSERVER.set(observer)
    with session_on(group, directory, {"max_batch_per_worker": 2}) as s:
        model = s.model(net())
        s.optimizer(sgd(model))
        batches = s.loader(TensorDataset(*points(8)), global_batch=4)
        test = s.eval_loader(TensorDataset(*points(3)))
        for _ in s.epochs(2):
            for batch in batches:
                s.step(F.cross_entropy(model(pair_of(batch)[0]), pair_of(batch)[1]))
            s.evaluate(lambda _: {"ones": 1.0}, test)
    return observer.calls


@pytest.mark.ranks
def test_an_observer_sees_it_all_and_may_end_an_epoch(tmp_path: Path) -> None:
    expected: list[object] = [("begin", ["model"])]
    for epoch in range(2):
        expected += [("epoch", epoch), *[("batch", epoch, 2), ("backward", 0.5)] * 2]
        expected += [("evaluated", {"ones": 1.0}, 3)]
    assert run_ranks(1, record, tmp_path) == [expected]
