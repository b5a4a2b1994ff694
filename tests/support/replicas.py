"""Trains a model whose gradients are averaged, in every way that there is to do so."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.gradient_sync.compression import Compression
from paceline.gradient_sync.powersgd import PowerSGD
from paceline.gradient_sync.replica import Replica
from tests.support.branches import Branches, assert_close, fresh, gradients, rows_of

Use = Callable[[Branches, Tensor, int], Tensor]
"""(model, rows, step) -> loss."""
Gradients = dict[str, Tensor | None]


def replica_of(module: nn.Module, group: Group, columns: int | None) -> Replica:
    """Have gradients averaged as they come, or after the backward pass by PowerSGD.

    With 1,000 columns nothing is approximated: PowerSGD's averages are exact.
    """
    replica = Replica(module, group)
    if columns is not None:
        replica.defer_to(PowerSGD(group.world_size, columns))
    return replica


def train(
    group: Group,
    use: Use,
    columns: int | None = None,
    compression: Compression | None = None,
    steps: int = 4,
) -> list[Gradients]:
    model = fresh(seed=group.rank)  # rank 0's weights are what all start from
    if compression is None:
        replica = replica_of(model, group, columns)
    else:
        replica = Replica(model, group)
        replica.compression = compression
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(steps):
        use(model, rows_of(group, step), step).backward()
        replica.finish_backward()
        found.append(gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return found


def assert_steps_close(every: Iterable[list[Gradients]], expected: list[Gradients]) -> None:
    """Compare what each of some workers has found, step by step."""
    for found in every:
        for got, wanted in zip(found, expected, strict=True):
            assert_close(got, wanted)
