"""Gradients averaged in a node's memory are those of DistributedDataParallel, on two workers bit by
bit: their sum has one order only, and half of it is exact."""

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.distributed.node_memory import connect_node
from paceline.gradient_sync.node_average import NodeAverage
from paceline.gradient_sync.replica import Replica
from tests.support.branches import (
    Branches,
    assert_close,
    bits,
    both,
    fresh,
    gradients,
    one_head,
    rows_of,
    scores_of,
)
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks

Loss = Callable[[Branches, Tensor, int], Tensor]


def in_memory(group: Group, model: nn.Module) -> Replica:
    memory, replica = connect_node(group), Replica(model, group)
    assert memory is not None
    replica.defer_to(NodeAverage(memory, model))
    return replica


def by_turns(model: Branches, rows: Tensor, step: int) -> Tensor:
    """One of two heads gets a gradient, another one in each step."""
    return scores_of(model, rows, spare=bool(step % 2)).square().mean()


@pytest.mark.parametrize("loss", [both, one_head], ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("workers", [2, 3])
def test_averages_are_those_of_ddp(workers: int, loss: Loss) -> None:
    def body(group: Group) -> None:
        model, twin = fresh(), fresh()
        replicas = in_memory(group, model), Replica(twin, group)
        for step in range(4):
            for trained, replica in zip((model, twin), replicas, strict=True):
                loss(trained, rows_of(group, step), step).backward()
                replica.finish_backward()
            if workers == 2:
                assert bits(gradients(model)) == bits(gradients(twin))
            assert_close(gradients(model), gradients(twin))
            with torch.no_grad():
                for parameter in (*model.parameters(), *twin.parameters()):
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad)
            model.zero_grad()
            twin.zero_grad()

    run_ranks(workers, body)


def test_parts_that_one_worker_alone_uses_count_as_zeros_elsewhere() -> None:
    def body(group: Group) -> None:
        model, twin = fresh(), fresh()
        replicas = in_memory(group, model), Replica(twin, group)
        for step in range(4):
            for trained, replica in zip((model, twin), replicas, strict=True):
                loss = by_turns(trained, rows_of(group, step), step + group.rank)
                loss.backward()
                replica.finish_backward()
            assert bits(gradients(model)) == bits(gradients(twin))
            model.zero_grad()
            twin.zero_grad()

    run_ranks(2, body)


def test_what_is_trained_may_change() -> None:
    def body(group: Group) -> None:
        model, twin = fresh(), fresh()
        replicas = in_memory(group, model), Replica(twin, group)
        for step in range(6):
            for trained, replica in zip((model, twin), replicas, strict=True):
                trained.spare.requires_grad_(step % 3 != 0)
                both(trained, rows_of(group, step), step).backward()
                replica.finish_backward()
            assert bits(gradients(model)) == bits(gradients(twin))
            model.zero_grad()
            twin.zero_grad()

    run_ranks(2, body)


def test_sparse_gradients_are_left_to_ddp() -> None:
    def body(group: Group) -> list[list[float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
        replica, found = in_memory(group, model), []
        for _ in range(3):
            model(torch.tensor([2 * group.rank])).sum().backward()
            replica.finish_backward()
            found.append(cast(Tensor, model[0].weight.grad).to_dense()[:, 0].tolist())
            model.zero_grad()
        return found

    found = run_ranks(2, body)
    assert found[0] == found[1]
    for row in found[0]:
        assert row[0] == row[2] != 0
        assert row[1] == row[3] == 0


def test_gradients_have_the_memory_format_of_the_weights() -> None:
    def body(group: Group) -> list[tuple[int, ...]]:
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        replica = in_memory(group, model)
        for _ in range(3):
            model.zero_grad()
            model(torch.ones(2, 3, 5, 5)).sum().backward()
            replica.finish_backward()
        assert model.weight.grad is not None
        return [model.weight.stride(), model.weight.grad.stride()]

    for weight, gradient in run_ranks(2, body):
        assert weight == gradient


def test_an_average_is_nobody_elses() -> None:
    """What one worker does with its gradients, such as clipping, the others don't see."""

    def body(group: Group) -> list[float]:
        model = nn.Linear(3, 2)
        replica, found = in_memory(group, model), []
        for step in range(4):
            model.zero_grad()
            model(torch.full((1, 3), float(step))).sum().backward()
            replica.finish_backward()
            assert model.weight.grad is not None
            found.append(float(model.weight.grad.sum()))
            model.weight.grad.mul_(group.rank)
        return found

    assert run_ranks(2, body) == [[6.0 * step for step in range(4)]] * 2
