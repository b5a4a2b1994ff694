"""Loops without a training loader: counted, saved, and gone on with."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.distributed.group import Group
from paceline.errors import InterruptedTraining, UsageError
from paceline.options.fields import OptionValue
from paceline.training.config import TrainRequest
from paceline.training.rng import seed_everything
from paceline.training.session import Session
from paceline.training.status_exchange import StopFlag
from paceline.training.worker import finish
from tests.support.ranks import run_ranks
from tests.support.sessions import assert_weights, net, points, session_on, sgd, weights_of

pytestmark = pytest.mark.ranks
STEPS, BATCH = 21, 8
REQUEST = TrainRequest(
    recipe="own.py",
    reference="own.py",
    arguments={},
    settings={},
    given=(),
    run_dir="",
    command=(),
    started_at="",
    kind="script",
)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Get a batch as language models' scripts do: drawn anew in each step."""
    return points(BATCH, seed=step)


def share(s: Session, step: int) -> tuple[Tensor, Tensor]:
    """This worker's half of it, or all."""
    size = BATCH // s.world_size
    x, y = batch_of(step)
    return x[s.rank * size :][:size], y[s.rank * size :][:size]


def plain() -> list[Tensor]:
    """What one process without Paceline does."""
    seed_everything(0)
    model = net()
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(STEPS):
        x, y = batch_of(step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    return weights_of(model)


def begun(s: Session, model: nn.Module, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    s.begin()
    while s.steps_done < STEPS:
        x, y = share(s, s.steps_done)
        s.step(F.cross_entropy(model(x), y))
        scheduler.step()


def stepped(s: Session, model: nn.Module, scheduler: torch.optim.lr_scheduler.LRScheduler) -> None:
    for step in s.steps(STEPS):
        x, y = share(s, step)
        s.step(F.cross_entropy(model(x), y))
        scheduler.step()


LOOPS = {"begin": begun, "steps": stepped}


def train(
    group: Group,
    directory: Path,
    loop: str,
    settings: Mapping[str, OptionValue],
    flag: StopFlag | None = None,
) -> list[Tensor]:
    with session_on(group, directory, settings, flag) as s:
        model = s.model(net())
        optimizer = s.optimizer(sgd(model))
        scheduler = s.scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
        try:
            LOOPS[loop](s, model, scheduler)
        except InterruptedTraining:
            return []
        s.engine.close_epoch()
        s.engine.context.run.run_json.touch()
        finish(s.engine, REQUEST)
        return weights_of(model)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.core_cases(2)
def test_updates_are_counted_and_saved(world_size: int, loop: str, tmp_path: Path) -> None:
    for weights in run_ranks(world_size, train, tmp_path, loop, {}):
        assert_weights(weights, plain())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["steps"], summary["epochs"]) == (STEPS, 0)
    assert (summary["stopped_because"], summary["images_per_s"]) == ("script", None)
    assert summary["train_loss"] == pytest.approx(0.4, abs=0.3)
    assert [path.name for path in (tmp_path / "snapshots").glob("step-*")] == [f"step-{STEPS:012}"]


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_that_was_stopped_goes_on_with_the_same_bits(loop: str, tmp_path: Path) -> None:
    """The scheduler's step, behind the update, belongs to the step that it follows."""
    (expected,) = run_ranks(1, train, tmp_path / "whole", loop, {})

    def stopped(group: Group) -> list[Tensor]:
        flag = StopFlag(under_launcher=True)
        original = batch_of

        def signalled(step: int) -> tuple[Tensor, Tensor]:
            flag.name = "SIGTERM" if step == 9 else flag.name
            return original(step)

        globals()["batch_of"] = signalled  # in a forked process of its own
        return train(group, tmp_path / "legs", loop, {}, flag)

    assert run_ranks(1, stopped) == [[]]
    steps = [int(path.name[5:]) for path in (tmp_path / "legs" / "snapshots").glob("step-*")]
    assert max(steps) in (9, 10)
    (found,) = run_ranks(1, train, tmp_path / "legs", loop, {})
    assert all(map(torch.equal, found, expected))


def test_a_step_with_several_optimizers_ends_with_the_last_of_them(tmp_path: Path) -> None:
    def body(group: Group) -> int:
        with session_on(group, tmp_path) as s:
            one, two = s.model(net(), name="one"), s.model(net(), name="two")
            first, second = s.optimizer(sgd(one)), s.optimizer(sgd(two))
            s.begin()
            for _ in range(3):
                for _ in range(2):  # a critic, twice
                    s.step(one(points()[0]).mean(), first)
                s.step(two(points()[0]).mean(), second)
            return s.steps_done

    assert run_ranks(1, body) == [3]


@pytest.mark.parametrize("call", ["steps", "begin"])
def test_what_such_a_loop_cannot_have_is_told(call: str, tmp_path: Path) -> None:
    def body(group: Group) -> None:
        settings = {"time_budget": "1h"} if call == "begin" else {}
        with session_on(group, tmp_path, settings) as s:
            s.loader(TensorDataset(*points()), global_batch=BATCH)
            with pytest.raises(UsageError, match=r"s\.epochs"):
                s.steps(3) if call == "steps" else s.begin()

    run_ranks(1, body)


def test_steps_before_the_training_are_named_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            for _ in range(2):  # in the place of s.epochs(2) or s.steps(2)
                for x, y in [points(BATCH)] * 2:
                    s.step(F.cross_entropy(model(x), y))

    run_ranks(1, body)
    said = capfd.readouterr().out
    assert said.count("a step before the training has begun") == 1
    assert "for epoch in s.epochs(count):" in said.replace("\n", " ")
