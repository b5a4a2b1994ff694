"""Parameters that a loop freezes and thaws, and optimizers that it makes on the way."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.data import TensorDataset

from paceline.data.order import epoch_order
from paceline.distributed.group import Group
from paceline.errors import InterruptedTraining
from paceline.options.fields import OptionValue
from paceline.training.rng import seed_everything
from paceline.training.session import Session
from paceline.training.status_exchange import StopFlag
from tests.support.ranks import run_ranks
from tests.support.sessions import (
    BATCH,
    SAMPLES,
    assert_weights,
    net,
    pair_of,
    points,
    session_on,
    sgd,
    weights_of,
)

pytestmark = pytest.mark.ranks
EPOCHS, THAWED, STEPS = 4, 1, 7
"""Epochs, the first in which all parameters are trained, and steps of each."""
Settings = Mapping[str, OptionValue]
SETTINGS: Mapping[str, Settings] = {
    "plain": {},
    "shards": {"shards": 4},
    "ema": {"ema": 0.9},
    "groups": {},
    "groups, shards": {"shards": 4},
}


def thaw(model: nn.Sequential, epoch: int) -> None:
    if epoch == THAWED:
        model[0].requires_grad_(True)


def fine_tune(
    group: Group,
    directory: Path,
    settings: Settings,
    most: int,
    change: Callable[[nn.Sequential, int], None] = thaw,
    begin: Callable[[nn.Module], object] = lambda layer: layer.requires_grad_(False),
    *,
    adds_group: bool = False,
) -> list[Tensor]:
    """Train the head, later all; stop by a signal after `most` steps of this start.

    With `adds_group` the first layer comes to the optimizer as it is thawed.
    """
    flag, steps = StopFlag(under_launcher=True), 0
    with session_on(group, directory, {"epochs": EPOCHS, **settings}, flag) as s:
        model = net()
        begin(model[0])
        optimizer = s.optimizer(sgd(s.model(model)[1:] if adds_group else s.model(model)))
        batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
        with suppress(InterruptedTraining):
            for epoch in s.epochs(EPOCHS):
                change(model, epoch)
                if adds_group and epoch == THAWED:
                    optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.01})
                for x, y in map(pair_of, batches):
                    optimizer.zero_grad()
                    s.backward(F.cross_entropy(model(x), y))
                    optimizer.step()
                    steps += s.engine.step.batch is None or s.engine.step.batch.last
                    flag.name = "SIGTERM" if steps == most else None
        return weights_of(model)


def plain_fine_tuning() -> list[Tensor]:
    """What one process without Paceline does."""
    seed_everything(0)
    model = net()
    model[0].requires_grad_(False)
    optimizer, (inputs, targets) = sgd(model), points()
    for epoch in range(EPOCHS):
        thaw(model, epoch)
        for picked in torch.from_numpy(epoch_order(SAMPLES, 0, epoch)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[picked]), targets[picked]).backward()
            optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize(
    ("setting", "world_size", "most"),
    [
        ("plain", 2, STEPS + 2),  # within the epoch that thaws, after which it isn't thawed again
        ("shards", 2, 2 * STEPS + 3),
        ("plain", 1, 2 * STEPS),
        ("plain", 2, 3),
        ("ema", 2, STEPS + 2),
        ("groups", 2, STEPS + 2),  # within the epoch that adds it, which adds it again
        ("groups, shards", 1, 2 * STEPS + 3),
    ],
)
@pytest.mark.core_cases(3)
def test_a_resumed_training_has_the_layers_thawed_that_its_loop_has_thawed(
    most: int, world_size: int, setting: str, tmp_path: Path
) -> None:
    settings, adds_group = SETTINGS[setting], setting.startswith("groups")
    train = partial(fine_tune, adds_group=adds_group)
    whole = run_ranks(world_size, train, tmp_path / "whole", settings, -1)
    if not adds_group:
        assert_weights(whole[0], plain_fine_tuning())
    run_ranks(world_size, train, tmp_path / "legs", settings, most)
    for resumed in run_ranks(world_size, train, tmp_path / "legs", settings, -1):
        assert all(map(torch.equal, resumed, whole[0]))


def freeze_the_head_at_first(model: nn.Sequential, epoch: int) -> None:
    model[-1].requires_grad_(epoch > 0)


def leave(_: nn.Sequential, __: int) -> None:
    pass


@pytest.mark.parametrize("most", [-1, 3])
def test_layers_may_be_frozen_when_all_is_registered(most: int, tmp_path: Path) -> None:
    """By the script behind `s.model`, and by a snapshot of an epoch that freezes them."""

    def body(group: Group, directory: Path, most: int) -> list[Tensor]:
        with session_on(
            group, directory, {"epochs": 2}, flag := StopFlag(under_launcher=True)
        ) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            if most < 0:
                freeze_the_head_at_first(model, 0)
            with suppress(InterruptedTraining):
                for epoch in s.epochs(2):
                    freeze_the_head_at_first(model, epoch)
                    for number, (x, y) in enumerate(map(pair_of, batches), 1):
                        s.step(F.cross_entropy(model(x), y))
                        flag.name = "SIGTERM" if number == most else None
            return weights_of(model)

    (alone,) = run_ranks(1, body, tmp_path / "alone", -1)
    run_ranks(2, body, tmp_path / "both", most)
    for weights in run_ranks(2, body, tmp_path / "both", -1):
        assert_weights(weights, alone)


def test_what_is_as_the_snapshot_has_it_and_not_the_script_is_said_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, fine_tune, tmp_path, {}, STEPS + 2)
    assert "As in the snapshot" not in capfd.readouterr().out
    run_ranks(2, fine_tune, tmp_path, {}, STEPS)
    assert "As in the snapshot" in (said := capfd.readouterr().out)
    assert said.count("2 parameters are trained (0.weight, 0.bias), other than the script") == 1


def test_freezing_that_was_changed_between_two_starts_is_undone_with_a_word(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(1, fine_tune, tmp_path, {}, STEPS, leave)
    capfd.readouterr()
    (before,) = run_ranks(1, fine_tune, tmp_path, {}, STEPS, leave, lambda layer: None)
    assert "2 parameters are frozen (0.weight, 0.bias)" in capfd.readouterr().out
    (after,) = run_ranks(1, fine_tune, tmp_path, {}, STEPS, lambda m, _: m.requires_grad_(True))
    assert torch.equal(before[0], weights_of(plain_net())[0])
    assert not torch.equal(before[0], after[0])


def plain_net() -> nn.Module:
    seed_everything(0)
    return net()


Make = Callable[[Session, nn.Module, Optimizer], Optimizer]


def with_another(group: Group, directory: Path, make: Make, most: int) -> int:
    """Train by another optimizer from the second epoch on; returns the hooks on all optimizers."""
    flag, steps = StopFlag(under_launcher=True), 0
    with session_on(group, directory, {}, flag) as s:
        model = s.model(net())
        optimizer = s.optimizer(sgd(model))
        other = make(s, model, optimizer)
        batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
        with suppress(InterruptedTraining):
            for epoch in s.epochs(2):
                for x, y in map(pair_of, batches):
                    used = other if epoch else optimizer
                    used.zero_grad()
                    s.backward(F.cross_entropy(model(x), y))
                    used.step()
                    steps += 1
                    flag.name = "SIGTERM" if steps == most else None
    return len(_global_optimizer_post_hooks)


def unknown(_: Session, model: nn.Module, __: Optimizer) -> Optimizer:
    return sgd(model)


def registered(s: Session, model: nn.Module, _: Optimizer) -> Optimizer:
    return s.optimizer(sgd(model))


def kept(s: Session, model: nn.Module, _: Optimizer) -> Optimizer:
    return s.keep(sgd(model), name="another")


def sharing(_: Session, model: nn.Module, optimizer: Optimizer) -> Optimizer:
    other = sgd(model)
    other.state = optimizer.state
    return other


@pytest.mark.parametrize("most", [-1, STEPS + 2])
@pytest.mark.parametrize("make", [unknown, registered, kept, sharing])
@pytest.mark.core_cases(4)
def test_an_optimizer_that_no_snapshot_has_is_named_where_it_steps(
    make: Make, most: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_ranks(2, with_another, tmp_path, make, most) == [0, 0]
    said = capfd.readouterr().out
    assert said.count("an optimizer that the session doesn't know (SGD)") == int(make is unknown)
    assert "gradients that no update has used" not in said


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_what_the_loop_has_frozen_isnt_told_as_left_out(
    workers: int, frozen: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(1):
                for parameter in model[0].parameters() if frozen else ():
                    parameter.requires_grad_(False)
                for batch in batches:
                    inputs, targets = pair_of(batch)
                    hidden = model[0](inputs).detach().tanh()
                    s.step(F.cross_entropy(model[2](hidden), targets))

    run_ranks(workers, body)
    read = capfd.readouterr()
    assert ("get no gradient and stay" in read.out + read.err) is not frozen
