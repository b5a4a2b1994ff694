"""A step: backward, combine, clip, update; beside plain PyTorch in one process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.data.batch import Batch
from paceline.data.order import epoch_order
from paceline.distributed.group import Group
from paceline.errors import JobError, UsageError
from paceline.gradient_sync.powersgd import PowerSGD
from paceline.launch.heartbeat import note
from paceline.optim.loss_scaler import LossScaler
from paceline.options.fields import OptionValue
from paceline.training.optimizer_step import OptimizerStep
from paceline.training.profiling.step_profiler import StepProfiler
from paceline.training.rng import seed_everything
from tests.support.ranks import run_ranks
from tests.support.sessions import (
    BATCH,
    EPOCHS,
    assert_weights,
    net,
    pair_of,
    plain_loop,
    points,
    session_on,
    sgd,
    weights_of,
)

CPU = torch.device("cpu")
ROUNDS = 8
LOST = 3
"""A step of which a gradient isn't finite."""


def make_optimizer_step(
    optimizers: list[torch.optim.Optimizer],
    scaler: LossScaler | None = None,
    clip_norm: float | None = None,
) -> OptimizerStep:
    optimizer_step = OptimizerStep(
        scaler=scaler,
        clip_norm=clip_norm,
        step_profiler=StepProfiler(note, CPU, 1, dict),
        report=lambda _: None,
    )
    for optimizer in optimizers:
        optimizer_step.add_optimizer(optimizer, lambda optimizer: None)
    return optimizer_step


def whole(batch: Tensor) -> Batch:
    """A step that this worker takes alone."""
    size = len(batch)
    return Batch(content=(batch, batch), local=size, total=size, indices=np.arange(size))


def make_scaler() -> LossScaler:
    return LossScaler("cpu", init_scale=2.0**16, growth_interval=2)


def losses(model: nn.Module, step: int) -> Tensor:
    inputs, targets = points(seed=step)
    loss = F.cross_entropy(model(inputs[:BATCH]), targets[:BATCH])
    return loss * torch.inf if step == LOST else loss


def plain_fp16(clip_norm: float) -> tuple[list[Tensor], list[float]]:
    """As PyTorch's examples of mixed precision do it: unscale, then clip, then step and update."""
    torch.manual_seed(0)
    model, scales = net(), []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=2)
    optimizer = sgd(model)
    for step in range(ROUNDS):
        scaler.scale(losses(model, step)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return weights_of(model), scales


@pytest.mark.parametrize("early", [False, True], ids=["step", "backward and update"])
def test_a_loss_scaler_is_used_in_the_order_of_pytorchs_examples(early: bool) -> None:
    torch.manual_seed(0)
    model, scaler, scales = net(), make_scaler(), []
    optimizer = sgd(model)
    optimizer_step = make_optimizer_step([optimizer], scaler, clip_norm=0.1)
    for step in range(ROUNDS):
        optimizer_step.run_backward(losses(model, step), 1.0, completes=True)
        if early:
            optimizer_step.unscale([optimizer])
        optimizer_step.update([optimizer])
        scales.append(scaler.get_scale())
        assert all(p.grad is None for p in model.parameters())
    expected, expected_scales = plain_fp16(clip_norm=0.1)
    assert scales == expected_scales
    assert scales[LOST] == scales[LOST - 1] / 2
    assert_weights(weights_of(model), expected, atol=0)


def test_a_first_step_that_overflows_leaves_fused_momentum_at_zero() -> None:
    torch.manual_seed(0)
    weights = []
    # What nobody has written is NaN.
    torch.use_deterministic_algorithms(True)
    try:
        for fused in (False, True):
            torch.manual_seed(0)
            model, scaler = net(), make_scaler()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=fused)
            optimizer_step = make_optimizer_step([optimizer], scaler)
            for step in range(4):
                loss = losses(model, step) * (float("inf") if step == 0 else 1.0)
                optimizer_step.run_backward(loss, 1.0, completes=True)
                optimizer_step.update([optimizer])
            weights.append(weights_of(model))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_weights(weights[1], weights[0], atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_weighted_loss_has_the_gradient_of_its_product(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    model = net().to(dtype)
    step = make_optimizer_step([sgd(model)])
    inputs, targets = points(seed=1)
    found = []
    for product in (True, False):
        model.zero_grad()
        loss = F.cross_entropy(model(inputs.to(dtype)), targets).reshape(shape)
        if product:
            (loss * (11 / 3)).backward()
        else:
            step.run_backward(loss, 11 / 3, completes=True)
        found.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *found))


def test_a_weighted_loss_of_several_numbers_is_refused_as_by_pytorch() -> None:
    model = net()
    step = make_optimizer_step([sgd(model)])
    scores = model(points(seed=1)[0])
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        step.run_backward(scores, 0.5, completes=True)
    with pytest.raises(RuntimeError, match="only for real scalar outputs"):
        step.run_backward(torch.view_as_complex(scores[0, :2].contiguous()), 0.5, completes=True)


def test_once_unscaled_gradients_take_no_more() -> None:
    model = net()
    optimizer = sgd(model)
    optimizer_step = make_optimizer_step([optimizer], make_scaler())
    optimizer_step.run_backward(losses(model, 0), 1.0, completes=True)
    optimizer_step.run_backward(losses(model, 1), 1.0, completes=True)
    optimizer_step.unscale([optimizer])
    with pytest.raises(UsageError, match="with fp16 the gradients have their true size"):
        optimizer_step.run_backward(losses(model, 2), 1.0, completes=True)


def test_the_optimizers_that_arent_asked_keep_their_weights_and_lose_their_gradients() -> None:
    torch.manual_seed(0)
    first, second = net(), net()
    optimizers: list[torch.optim.Optimizer] = [sgd(first), sgd(second)]
    before = weights_of(second)
    optimizer_step = make_optimizer_step(optimizers)
    optimizer_step.run_backward(losses(first, 0) + losses(second, 0), 1.0, completes=True)
    optimizer_step.update(optimizers[:1])
    assert_weights(weights_of(second), before, atol=0)
    assert all(p.grad is None for p in second.parameters())


def train(
    group: Group,
    directory: Path,
    settings: dict[str, OptionValue],
    after: Callable[[torch.optim.Optimizer], object] = id,
) -> list[Tensor]:
    with session_on(group, directory, settings) as s:
        model = s.model(net())
        optimizer = s.optimizer(sgd(model))
        batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
        for _ in s.epochs(EPOCHS):
            for x, y in map(pair_of, batches):
                s.step(F.cross_entropy(model(x), y))
                after(optimizer)
        return weights_of(model)


@pytest.mark.ranks
@pytest.mark.parametrize("settings", [{}, {"max_batch_per_worker": 1}, {"clip_norm": 0.1}], ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.core_cases(2)
def test_shards_with_unequal_shares_train_as_a_plain_loop(
    world_size: int, settings: dict[str, OptionValue], tmp_path: Path
) -> None:
    # Of 8 samples the five shards have 2, 2, 2, 1 and 1; of the last step's 2 three have none.
    settings = {"shards": 5, **settings}
    clip = 0.1 if "clip_norm" in settings else None
    for found in run_ranks(world_size, train, tmp_path, settings):
        assert_weights(found, plain_loop(clip=clip))


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 3])
def test_clip_norm_clips_as_a_plain_loop_does(world_size: int, tmp_path: Path) -> None:
    expected = plain_loop(clip=0.1)
    unclipped = plain_loop()
    assert max(float((a - b).abs().max()) for a, b in zip(expected, unclipped, strict=True)) > 1e-2
    settings: dict[str, OptionValue] = {"clip_norm": 0.1}
    for found in run_ranks(world_size, train, tmp_path, settings):
        assert_weights(found, expected)


@pytest.mark.ranks
def test_a_step_of_the_scripts_own_is_refused_after_updates_too(tmp_path: Path) -> None:
    def body(group: Group) -> str:
        def step_too(optimizer: torch.optim.Optimizer) -> None:
            with pytest.raises(UsageError) as caught:
                optimizer.step()
            raise InterruptedError(str(caught.value))

        with pytest.raises(InterruptedError) as told:
            train(group, tmp_path, {}, step_too)
        return str(told.value)

    (said,) = run_ranks(1, body)
    assert said.startswith("optimizer.step() by the script itself")


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("schedule_first", [False, True])
def test_a_scheduler_sees_that_its_optimizer_steps(schedule_first: bool) -> None:
    def weights(ours: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = net()
        optimizer = sgd(model)
        make = partial(torch.optim.lr_scheduler.StepLR, optimizer, 2)
        scheduler = make() if schedule_first else None
        optimizer_step = make_optimizer_step([optimizer] if ours else [])
        scheduler = scheduler or make()
        for step in range(LOST):
            optimizer_step.run_backward(losses(model, step), 1.0, completes=True)
            if ours:
                optimizer_step.update([optimizer])
            else:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        return weights_of(model)

    assert_weights(weights(ours=True), weights(ours=False), atol=0)


class OwnStep(torch.optim.SGD):
    """An optimizer of a script's, with more around its step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=0.1)
        self.steps = 0

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        assert closure is None
        self.steps += 1
        super().step()


def test_a_steps_arguments_reach_it() -> None:
    class Scaled(torch.optim.SGD):
        scalers: ClassVar[list[object]] = []

        def step(self, closure: object = None, *, grad_scaler: object = None) -> None:  # type: ignore[override]
            self.scalers.append(grad_scaler)

    optimizer = Scaled(net().parameters(), lr=0.1)
    optimizer_step = make_optimizer_step([optimizer])
    optimizer_step.is_updating = True
    for number in range(LOST):
        optimizer.step(grad_scaler=number)
    assert Scaled.scalers == [*range(LOST)]


def test_a_script_may_bring_an_optimizer_or_a_step_of_its_own() -> None:
    model, wrapped = net(), net()
    optimizer, other = OwnStep(model), sgd(wrapped)
    taken: list[bool] = []
    plain = other.step
    other.step = MethodType(lambda _: taken.append(plain() is None), other)  # type: ignore[method-assign]
    optimizer_step = make_optimizer_step([optimizer, other])
    for step in range(LOST):
        loss = losses(model, step) + losses(wrapped, step)
        optimizer_step.run_backward(loss, 1.0, completes=True)
        optimizer_step.update([optimizer, other])
    assert optimizer.steps == len(taken) == LOST


class Two(nn.Module):
    """Two layers, of which the second may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, inputs: Tensor, *, deep: bool) -> Tensor:
        hidden: Tensor = self.first(inputs)
        return (self.second(hidden) if deep else hidden).square().mean()


@pytest.mark.ranks
def test_what_an_abandoned_step_reached_counts_for_nothing(tmp_path: Path) -> None:
    def body(group: Group) -> bool:
        with session_on(group, tmp_path, {"sync": "powersgd", "powersgd_rank": 1}) as s:
            torch.manual_seed(0)
            model = s.model(Two())
            (replica,) = s.engine.context.replicas
            replica.defer_to(PowerSGD(group.world_size, 1))
            inputs = points()[0][:BATCH]
            model(inputs, deep=True).backward()
            replica.finish_backward()
            replica.syncing = False
            model(inputs, deep=True).backward()  # the first piece of a step that the script leaves
            replica.reset()
            model(inputs, deep=False).backward()
            with pytest.raises(JobError, match=r"second\..* got no gradient in this step"):
                replica.finish_backward()
            return replica.syncing

    assert run_ranks(2, body) == [True, True]


@pytest.mark.ranks
def test_a_step_that_is_left_between_its_pieces_trains_nothing(tmp_path: Path) -> None:
    def body(group: Group) -> list[Tensor]:
        with session_on(group, tmp_path, {"max_batch_per_worker": 2}) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for epoch in s.epochs(2):
                for count, (x, y) in enumerate(map(pair_of, batches)):
                    complete = s.step(F.cross_entropy(model(x), y))
                    if epoch == 0 and count == 2:  # the second step's first piece of two
                        assert not complete
                        break
            return weights_of(model)

    for found in run_ranks(2, body):
        assert_weights(found, left_early(steps=1))


def left_early(steps: int) -> list[Tensor]:
    """A plain loop of two epochs, the first of which ends after some steps."""
    seed_everything(0)
    model = net()
    optimizer = sgd(model)
    inputs, targets = points()
    for epoch in range(2):
        order = torch.from_numpy(epoch_order(len(inputs), 0, epoch))
        for picked in order.split(BATCH)[: steps if epoch == 0 else None]:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[picked]), targets[picked]).backward()
            optimizer.step()
    return weights_of(model)
