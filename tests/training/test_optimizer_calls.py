"""Optimizers that the script steps itself, and several backward passes before one update."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.data.order import epoch_order
from paceline.distributed.group import Group
from paceline.errors import UsageError
from paceline.options.fields import OptionValue
from paceline.training.rng import seed_everything
from paceline.training.session import Session
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

pytestmark = pytest.mark.ranks
SETTINGS: Mapping[str, Mapping[str, OptionValue]] = {
    "plain": {},
    "pieces": {"max_batch_per_worker": 3},
    "shards": {"shards": 4},
    "shards in pieces": {"shards": 2, "max_batch_per_worker": 2},
    "fp16": {"precision": "fp16"},
}
Body = Callable[[Session, nn.Module, torch.optim.Optimizer, Tensor, Tensor], None]


def train(
    group: Group, directory: Path, settings: Mapping[str, OptionValue], do: Body
) -> list[Tensor]:
    with session_on(group, directory / str(group.world_size), settings) as s:
        model = s.model(net())
        optimizer = s.optimizer(sgd(model))
        batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
        for _ in s.epochs(EPOCHS):
            for batch in batches:
                do(s, model, optimizer, *pair_of(batch))
        assert s.steps_done == EPOCHS * math.ceil(50 / BATCH)
        return weights_of(model)


def as_pytorch_writes_it(
    s: Session, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> None:
    optimizer.zero_grad()
    s.backward(F.cross_entropy(model(x), y))
    optimizer.step()


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.core_cases(3)
def test_step_and_zero_grad_stay_as_they_are(world_size: int, setting: str, tmp_path: Path) -> None:
    """`s.backward(loss)` in the place of `loss.backward()` is all that changes."""
    found = run_ranks(world_size, train, tmp_path, SETTINGS[setting], as_pytorch_writes_it)
    for weights in found:
        assert_weights(weights, plain_loop(), atol=0.03 if setting == "fp16" else 1e-6)


def halves(x: Tensor, y: Tensor, model: nn.Module) -> tuple[Tensor, Tensor]:
    """Two losses of different kinds, whose sum a plain loop could take as well."""
    scores = model(x)
    return F.cross_entropy(model(x), y), scores.square().mean()


def in_two_passes(
    s: Session, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> None:
    first, second = halves(x, y, model)
    assert not s.backward(first, more=True)
    s.backward(second)
    s.update()


def in_two_passes_of_its_own_step(
    s: Session, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> None:
    optimizer.zero_grad()
    s.backward(F.cross_entropy(model(x), y), more=True)
    s.backward(model(x).square().mean())
    optimizer.step()


def plain_in_two_passes() -> list[Tensor]:
    """One process, plain PyTorch, the batches in the session's order."""

    def losses(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        first, second = halves(x, y, model)
        return first + second

    return plain_loop(loss=losses)


@pytest.mark.parametrize("do", [in_two_passes, in_two_passes_of_its_own_step])
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.core_cases(3)
def test_two_backward_passes_before_one_update(
    world_size: int, setting: str, do: Body, tmp_path: Path
) -> None:
    found = run_ranks(world_size, train, tmp_path, SETTINGS[setting], do)
    for weights in found:
        tolerance = 0.03 if setting == "fp16" else 1e-6
        assert_weights(weights, plain_in_two_passes(), atol=tolerance)


@pytest.mark.slow
def test_two_passes_have_the_same_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    settings = SETTINGS["shards"]
    (expected,) = run_ranks(1, train, tmp_path, settings, in_two_passes)
    for found in run_ranks(3, train, tmp_path, settings, in_two_passes):
        assert all(map(torch.equal, found, expected))


def unannounced(
    s: Session, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> None:
    first, second = halves(x, y, model)
    s.backward(first)
    s.backward(second)
    s.update()


def test_without_shards_the_second_pass_needs_no_announcement(tmp_path: Path) -> None:
    for found in run_ranks(2, train, tmp_path, {}, unannounced):
        assert_weights(found, plain_in_two_passes())


def test_with_shards_it_does(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with pytest.raises(UsageError, match=r"s\.backward\(first, more=True\)"):
            train(group, tmp_path, SETTINGS["shards"], unannounced)

    run_ranks(1, body)


def alone(
    s: Session, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> None:
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def after_a_step(
    s: Session, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
) -> None:
    s.step(F.cross_entropy(model(x), y))
    optimizer.step()


@pytest.mark.parametrize("do", [alone, after_a_step])
def test_a_step_without_the_workers_gradients_is_told(do: Body, tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with pytest.raises(UsageError, match=r"put s\.backward\(loss\) in the place"):
            train(group, tmp_path, {}, do)

    run_ranks(1, body)


class Failing(torch.optim.SGD):
    """Fails in its first step."""

    has_failed = False

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if not self.has_failed:
            self.has_failed = True
            raise ArithmeticError
        super().step()


def test_a_step_that_failed_leaves_later_ones_guarded(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            model = s.model(net())
            optimizer = s.optimizer(Failing(model.parameters(), lr=0.1))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(1):
                for number, (inputs, targets) in enumerate(map(pair_of, batches)):
                    if number == 0:
                        with pytest.raises(ArithmeticError):
                            s.step(F.cross_entropy(model(inputs), targets))
                        continue
                    before = weights_of(model)
                    F.cross_entropy(model(inputs), targets).backward()
                    with pytest.raises(UsageError):
                        optimizer.step()
                    assert all(map(torch.equal, before, weights_of(model)))
                    return

    run_ranks(2, body)


def test_the_optimizer_is_its_own_again_after_the_session(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            model = s.model(net())
            optimizer = s.optimizer(sgd(model))
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # wraps `step` once more
        before = weights_of(model)
        model(points()[0]).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert not all(map(torch.equal, before, weights_of(model)))
        assert all(p.grad is None for p in model.parameters())

    run_ranks(1, body)


def rate(step: int) -> float:
    return 0.1 * 0.9**step


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.core_cases(2)
def test_a_rate_that_the_script_sets_before_each_batch(setting: str, tmp_path: Path) -> None:
    """As language models' scripts do; the same for all shards of a step."""

    def do(
        s: Session, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor
    ) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate(s.steps_done)
        s.step(F.cross_entropy(model(x), y))

    found = run_ranks(2, train, tmp_path, SETTINGS[setting], do)
    tolerance = 0.03 if setting == "fp16" else 1e-6
    assert_weights(found[0], plain_loop(rate=rate), atol=tolerance)


def test_a_rate_that_differs_between_shards_is_refused(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path, {"shards": 2}) as s:
            model = s.model(net())
            optimizer = s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(1):
                for number, batch in enumerate(batches):
                    optimizer.param_groups[0]["lr"] = rate(number)
                    x, y = pair_of(batch)
                    s.step(F.cross_entropy(model(x), y))

    def told(group: Group) -> None:
        with pytest.raises(UsageError, match="changed between two shards"):
            body(group)

    run_ranks(1, told)


RING = torch.stack([torch.arange(50).cos(), torch.arange(50).sin()], 1)
NOISE = RING.flip(1)
"""Instead of noise, so that all workers have the same."""


def nets() -> tuple[nn.Module, nn.Module]:
    def make(outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, outputs))

    return make(2), make(1)


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), 1e-2)


def plain_gan() -> list[Tensor]:
    """As DCGAN's example does it: two passes for the discriminator, one for the generator."""
    seed_everything(0)
    make, judge = nets()
    making, judging = adam(make), adam(judge)
    for epoch in range(EPOCHS):
        for picked in torch.from_numpy(epoch_order(50, 0, epoch)).split(BATCH):
            judge.zero_grad()
            F.softplus(-judge(RING[picked])).mean().backward()
            fake = make(NOISE[picked])
            F.softplus(judge(fake.detach())).mean().backward()
            judging.step()
            make.zero_grad()
            F.softplus(-judge(fake)).mean().backward()
            making.step()
    return weights_of(make, judge)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.slow
def test_a_gan_of_two_passes_and_two_optimizers(world_size: int, tmp_path: Path) -> None:
    def body(group: Group) -> list[Tensor]:
        with session_on(group, tmp_path) as s:
            make, judge = nets()
            making, judging = adam(make), adam(judge)
            make, judge, making, judging = s.prepare(make, judge, making, judging)
            batches = s.loader(TensorDataset(RING, NOISE), global_batch=BATCH)
            for _ in s.epochs(EPOCHS):
                for batch in batches:
                    real, noise = pair_of(batch)
                    judge.zero_grad()
                    s.backward(F.softplus(-judge(real)).mean(), more=True)
                    fake = make(noise)
                    s.backward(F.softplus(judge(fake.detach())).mean())
                    judging.step()
                    make.zero_grad()
                    s.backward(F.softplus(-judge(fake)).mean())
                    making.step()
            return weights_of(make, judge)

    for found in run_ranks(world_size, body):
        assert_weights(found, plain_gan(), atol=1e-5)


def test_a_zero_grad_that_the_script_puts_there_later_drops_gradients(tmp_path: Path) -> None:
    def body(group: Group) -> tuple[int, bool]:
        calls = 0
        with session_on(group, tmp_path) as s:
            model = s.model(net())
            optimizer = s.optimizer(sgd(model))
            found = optimizer.zero_grad

            def zero_grad(set_to_none: bool = True) -> None:
                nonlocal calls
                calls += 1
                found(set_to_none)

            optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(1):
                for x, y in map(pair_of, batches):
                    s.step(F.cross_entropy(model(x), y))
                    dropped = all(p.grad is None for p in model.parameters())
        return calls, dropped

    assert run_ranks(2, body) == [(7, True)] * 2
