"""Losses that are means over something else than samples: as in a plain loop of one process."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

from paceline.distributed.group import Group
from paceline.options.fields import OptionValue
from paceline.training.loss_weights import describe_weighted_mean, is_sum_over_samples
from tests.support.ranks import RankError, run_ranks
from tests.support.sessions import (
    BATCH,
    EPOCHS,
    assert_weights,
    entropy,
    net,
    pair_of,
    plain_loop,
    points,
    session_on,
    sgd,
    weights_of,
)

pytestmark = pytest.mark.ranks


def counted(inputs: Tensor) -> Tensor:
    """Which samples count: in some shares none does, whose mean is no number."""
    return inputs[:, 0] > 0.4


def mean_of_counted(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), targets.where(counted(inputs), -100))


WAYS: dict[str, dict[str, OptionValue]] = {
    "whole": {},
    "pieces": {"max_batch_per_worker": 3},
    "shards": {"shards": 4},
    "bf16 on the way": {"sync_precision": "bf16"},
}


def weighed_loop(group: Group, directory: Path, settings: dict[str, OptionValue]) -> list[Tensor]:
    with session_on(group, directory / str(group.world_size), settings) as s:
        model = s.model(net())
        optimizer = s.optimizer(sgd(model))
        batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
        for _ in s.epochs(EPOCHS):
            for batch in batches:
                inputs, targets = pair_of(batch)
                optimizer.zero_grad()
                s.backward(mean_of_counted(model, inputs, targets), weight=counted(inputs).sum())
                optimizer.step()
        return weights_of(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.core_cases(4)
def test_the_gradient_is_that_of_the_mean_over_all(
    way: str, world_size: int, tmp_path: Path
) -> None:
    settings = WAYS[way]
    found = run_ranks(world_size, weighed_loop, tmp_path, settings)
    rounded = way.startswith("bf16") and world_size > 1
    assert_weights(found[0], plain_loop(loss=mean_of_counted), atol=1e-2 if rounded else 1e-6)
    if "shards" in settings and world_size > 1:
        (alone,) = run_ranks(1, weighed_loop, tmp_path, settings)
        assert all(map(torch.equal, found[0], alone))


def test_samples_that_a_collate_leaves_out(tmp_path: Path) -> None:
    def keep(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        return tuple(default_collate([b for b in batch if b[0][1] < 0.3] or batch[:1]))

    def loader() -> DataLoader[object]:
        return DataLoader(TensorDataset(*points()), batch_size=BATCH, collate_fn=keep)

    def body(group: Group) -> list[Tensor]:
        with session_on(group, tmp_path) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(loader())
            for _ in s.epochs(EPOCHS):
                for batch in batches:
                    inputs, targets = pair_of(batch)
                    kept = int((inputs[:, 1] < 0.3).sum())
                    s.step(F.cross_entropy(model(inputs), targets), weight=kept)
            return weights_of(model)

    torch.manual_seed(0)
    found = run_ranks(2, body)[0]
    assert_weights(found, plain_loop(shuffle=False, loss=of_kept))


def of_kept(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    kept = inputs[:, 1] < 0.3
    return F.cross_entropy(model(inputs[kept]), targets[kept])


def test_steps_without_a_loader(tmp_path: Path) -> None:
    def body(group: Group) -> list[Tensor]:
        inputs, targets = points()
        with session_on(group, tmp_path / str(group.world_size)) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            for step in s.steps(5):
                begin, cut, end = 10 * step, 10 * step + 3, 10 * step + 10
                mine = [slice(begin, cut), slice(cut, end)][s.rank]
                if s.world_size == 1:
                    mine = slice(begin, end)
                loss = F.cross_entropy(model(inputs[mine]), targets[mine])
                s.step(loss, weight=len(inputs[mine]))
            return weights_of(model)

    (alone,) = run_ranks(1, body)
    assert_weights(run_ranks(2, body)[0], alone)


@pytest.mark.parametrize(
    ("wrong", "settings", "message"),
    [
        ("more", {}, "several backward passes about a batch"),
        ("missing", {"max_batch_per_worker": 3}, "a loss without weight"),
    ],
)
def test_what_would_mean_nothing_is_refused(
    wrong: str, settings: dict[str, OptionValue], message: str, tmp_path: Path
) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path, settings) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(1):
                for number, batch in enumerate(batches):
                    loss = F.cross_entropy(model(pair_of(batch)[0]), pair_of(batch)[1])
                    weight = None if wrong == "missing" and number % 2 else 1
                    s.backward(loss, more=wrong == "more", weight=weight)
                    s.update()

    with pytest.raises(RankError, match=message):
        run_ranks(1, body)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_weight_changes_no_gradients_of_earlier_passes(world_size: int, tmp_path: Path) -> None:
    """Two batches are accumulated."""
    begun = net()
    plain = deepcopy(begun)
    optimizer = sgd(plain)
    for number, (some, labels) in enumerate(DataLoader(TensorDataset(*points()), BATCH)):
        mean_of_counted(plain, some, labels).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()

    def body(group: Group) -> list[Tensor]:
        with session_on(group, tmp_path) as s:
            model = s.model(deepcopy(begun))
            optimizer = s.optimizer(sgd(model))
            loader = s.loader(TensorDataset(*points()), global_batch=BATCH, shuffle=False)
            for _ in s.epochs(1):
                for number, (some, labels) in enumerate(map(pair_of, loader)):
                    s.backward(mean_of_counted(model, some, labels), weight=counted(some).sum())
                    if number % 2:
                        optimizer.step()
                        optimizer.zero_grad()
        return weights_of(model)

    for found in run_ranks(world_size, body):
        assert_weights(found, weights_of(plain))


WRONG: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "float": (lambda losses: losses.mean().item(), r"the loss is a float: .* without \.item\(\)"),
    "vector": (lambda losses: losses, r"the loss has the shape \(8,\): .* loss\.mean\(\)"),
    "detached": (
        lambda losses: losses.mean().detach(),
        r"the loss has no gradient: .* torch\.no_grad\(\)",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("weight", [None, 8])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.core_cases(3)
def test_what_is_no_loss_is_refused(
    world_size: int, weight: int | None, wrong: str, tmp_path: Path
) -> None:
    change, message = WRONG[wrong]

    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=8 * world_size)
            for _ in s.epochs(1):
                for inputs, targets in map(pair_of, batches):
                    loss = change(F.cross_entropy(model(inputs), targets, reduction="none"))
                    s.step(loss, weight=weight)  # type: ignore[arg-type]  # that is the mistake

    with pytest.raises(RankError, match=message):
        run_ranks(world_size, body)


def test_a_model_whose_gradients_are_all_sparse(tmp_path: Path) -> None:
    def body(group: Group) -> Tensor:
        with session_on(group, tmp_path) as s:
            model = s.model(nn.Embedding(4, 2, sparse=True))
            before = model.weight.detach().clone()
            s.optimizer(torch.optim.SGD(model.parameters(), lr=0.8))
            batches = s.loader(TensorDataset(torch.tensor([0, 1, 1, 3])), global_batch=4)
            for _ in s.epochs(1):
                for batch in batches:
                    assert isinstance(batch, list | tuple)
                    s.step(model(batch[0]).sum() / 8, weight=8)
            return before - model.weight.detach()

    (moved,) = run_ranks(1, body)
    expected = torch.tensor([0.1, 0.2, 0.0, 0.1])[:, None].expand(4, 2)
    torch.testing.assert_close(moved, expected)


CLASSES = torch.tensor([1.0, 2.0])
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


def smoothed(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """Sum two losses, one of them class-weighted."""
    loss = nn.CrossEntropyLoss(CLASSES, label_smoothing=0.1)
    total: Tensor = 0.1 * model(inputs).mean() + loss(model(inputs), targets)
    return total


def of_two(scores: Tensor) -> Tensor:
    return torch.stack([scores, scores], 2)


def ignored(targets: Tensor) -> Tensor:
    return torch.full_like(targets, -100)


@pytest.mark.parametrize(
    ("loss", "mean"),
    [
        (entropy, None),
        (mean_of_counted, "the targets that it doesn't ignore: weight=(targets != ignore_index)"),
        (lambda m, x, y: F.cross_entropy(m(x), y, weight=CLASSES), "the weights of its targets'"),
        (smoothed, "the weights of its targets'"),
        # What each sample has as much of, and what may be added up rightly.
        (lambda m, x, y: F.cross_entropy(m(x), y, weight=torch.ones(2)), None),
        (lambda m, x, y: F.cross_entropy(of_two(m(x)), torch.stack([y, ignored(y)], 1)), None),
        (lambda m, x, y: mean_of_counted(m, x, y) + F.cross_entropy(m(x), y), None),
        # Nodes of graphs, boxes, what a mask has left: another number of them in each batch.
        (lambda m, x, y: F.cross_entropy(m(x)[:-3], y[:-3]), "its 47 targets, not over the 50"),
    ],
)
def test_what_a_loss_is_a_mean_over(loss: Loss, mean: str | None) -> None:
    inputs, targets = points()
    found = describe_weighted_mean(loss(net(), inputs, targets), len(inputs))
    assert (found or "").startswith(mean or "")
    assert (found is None) == (mean is None)


@pytest.mark.parametrize(("world_size", "told"), [(1, False), (2, True)])
def test_a_loss_that_is_no_mean_over_samples_is_told_once(
    world_size: int, told: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(1):
                for batch in batches:
                    inputs, targets = pair_of(batch)
                    s.step(F.cross_entropy(model(inputs), targets, weight=CLASSES))

    run_ranks(world_size, body)
    assert capfd.readouterr().out.count("weight=class_weights[targets].sum()") == told


def summed(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs), targets, reduction="sum")


def off(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    scores: Tensor = model(inputs)
    return scores - F.one_hot(targets, 2)


def penalty(model: nn.Module) -> Tensor:
    """Depends on weights alone."""
    return sum(((p**2).sum() for p in model.parameters()), start=torch.zeros(()))


def squares(model: nn.Module, inputs: Tensor, targets: Tensor, reduction: str) -> Tensor:
    return F.mse_loss(model(inputs), F.one_hot(targets, 2).float(), reduction=reduction)


@pytest.mark.parametrize(
    ("loss", "is_sum"),
    [
        (summed, True),
        (lambda m, x, y: F.cross_entropy(m(x), y, reduction="none").sum(), True),
        (lambda m, x, y: (off(m, x, y) ** 2).sum(), True),
        (lambda m, x, y: summed(m, x, y) + 0.1 * penalty(m), True),
        # Means, sums that are divided or weighed, and sums over something else.
        (entropy, False),
        (lambda m, x, y: squares(m, x, y, "mean"), False),
        (lambda m, x, y: summed(m, x, y) / len(x), False),
        (lambda m, x, y: (F.cross_entropy(m(x), y, reduction="none") / len(x)).sum(), False),
        (lambda m, x, y: (F.cross_entropy(m(x), y, reduction="none") * y).sum() / y.sum(), False),
        (lambda m, x, y: entropy(m, x, y) + penalty(m), False),
        (lambda m, x, y: torch.stack([entropy(m, x, y), penalty(m)]).sum(), False),
        (lambda m, x, y: (off(m, x, y) ** 2).sum(1).mean(), False),
    ],
)
def test_what_is_a_sum_over_samples(loss: Loss, is_sum: bool) -> None:
    inputs, targets = points()
    assert is_sum_over_samples(loss(net(), inputs, targets), len(inputs)) == is_sum
    assert not is_sum_over_samples(loss(net(), inputs[:1], targets[:1]), 1)


def test_a_penalty_is_no_sum_over_samples() -> None:
    model, (inputs, targets) = net(), points(4)  # of its weights some have 8 rows
    assert not is_sum_over_samples(entropy(model, inputs, targets) + penalty(model), len(inputs))


@pytest.mark.parametrize(("world_size", "told"), [(1, 0), (2, 1)])
def test_a_sum_is_averaged_over_the_workers_and_told_once(
    world_size: int, told: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Plain SGD in one process has `world_size` times this gradient, on equal shares."""

    def body(group: Group) -> list[Tensor]:
        with session_on(group, tmp_path) as s:
            model = s.model(net())
            s.optimizer(torch.optim.SGD(model.parameters(), 0.01))
            before, moved = weights_of(model), list[Tensor]()
            batches = s.loader(TensorDataset(*points(2 * BATCH)), global_batch=2 * BATCH)
            for _ in s.epochs(2):
                for batch in batches:
                    s.step(summed(model, *pair_of(batch)))
                    if not moved:
                        moved = [a - b for a, b in zip(weights_of(model), before, strict=True)]
            return [*before, *moved]

    found = run_ranks(world_size, body)[0]
    model = net()
    before, moved = found[: len(found) // 2], found[len(found) // 2 :]
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), before, strict=True):
            parameter.copy_(value)
    summed(model, *points(2 * BATCH)).backward()
    for parameter, step in zip(model.parameters(), moved, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(step, -0.01 * parameter.grad / world_size)
    assert capfd.readouterr().out.count("the loss is a sum over its samples") == told


def test_losses_that_share_a_graph_are_told_to_be_added(tmp_path: Path) -> None:
    """PyTorch's own advice is retain_graph, which the session's backward passes don't have."""

    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(1):
                for x, y in map(pair_of, batches):
                    scores = model(x)
                    s.backward(F.cross_entropy(scores, y), more=True)
                    s.step(scores.square().mean())

    with pytest.raises(RankError, match=r"add them: s\.backward\(first \+ second\)"):
        run_ranks(2, body)
