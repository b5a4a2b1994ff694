"""Workers whose weights or rates have drifted apart are named."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from paceline.distributed.group import Group
from paceline.errors import JobError
from paceline.gradient_sync.replica_consistency import ReplicaConsistency, drifted
from tests.support.ranks import run_ranks

ranks = pytest.mark.ranks


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))


@pytest.mark.parametrize(
    ("rows", "strange"),
    [
        ([[1, 2]] * 3, []),
        ([[1, 2], [1, 2], [1, 3]], [2]),
        ([[1, 3], [1, 2], [1, 2]], [0]),
        ([[1, 2], [1, 3]], [0, 1]),
        ([[1], [2], [3]], [0, 1, 2]),
        ([[1], [1], [2], [2]], [0, 1, 2, 3]),
        ([[1], [1], [2], [3], [1]], [2, 3]),
        ([[1]], []),
    ],
    ids=str,
)
def test_the_majority_counts_as_right(rows: list[list[int]], strange: list[int]) -> None:
    assert drifted(rows) == strange


def looked(world_size: int, plant: Callable[[Group, nn.Module, torch.optim.SGD], None]) -> str:
    """Plant a difference, look on all ranks, and give the message that all of them raised."""

    def body(group: Group) -> str:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plant(group, model, optimizer)
        guard = ReplicaConsistency(group, 10, lambda: dict(model.named_parameters()), [optimizer])
        guard.check(9)  # not due: a difference would be found
        try:
            guard.check(20)
        except JobError as error:
            return str(error)
        return ""

    (message,) = set(run_ranks(world_size, body))
    return message


@torch.no_grad()
def flip_a_bit(model: nn.Module) -> None:
    weight = next(iter(model.parameters()))
    weight.view(torch.int32)[1, 2] ^= 1


@ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_workers_that_are_alike(world_size: int) -> None:
    assert looked(world_size, lambda group, model, optimizer: None) == ""


@ranks
@pytest.mark.parametrize("strange", [0, 2])
def test_one_bit_of_one_weight(strange: int) -> None:
    def plant(group: Group, model: nn.Module, optimizer: torch.optim.SGD) -> None:
        if group.rank == strange:
            flip_a_bit(model)

    found = looked(3, plant)
    assert f"after step 20 rank {strange} on " in found
    assert "has drifted from the others: 0.weight differs" in found
    assert "and try another machine if it happens again" in found  # all are on one host


@ranks
def test_of_two_both_are_named() -> None:
    def plant(group: Group, model: nn.Module, optimizer: torch.optim.SGD) -> None:
        if group.rank:
            flip_a_bit(model)

    found = looked(2, plant)
    assert "rank 0 on " in found
    assert "rank 1 on " in found
    assert "have drifted from each other: 0.weight differs" in found


@ranks
def test_a_nan() -> None:
    def plant(group: Group, model: nn.Module, optimizer: torch.optim.SGD) -> None:
        if group.rank == 1:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.view(-1)[0] = torch.nan

    found = looked(3, plant)
    assert "rank 1 on " in found
    assert "0.weight, 0.bias, 1.weight and 3 more of 7 differ" in found


@ranks
def test_a_learning_rate() -> None:
    def plant(group: Group, model: nn.Module, optimizer: torch.optim.SGD) -> None:
        if group.rank == 1:
            optimizer.param_groups[0]["lr"] = 0.1 + 1e-17 + 2e-17
            assert optimizer.param_groups[0]["lr"] != 0.1

    assert "rank 1 on " in looked(3, plant)
    assert "learning rate differs" in looked(3, plant)


@ranks
def test_groups_and_optimizers_are_told_apart() -> None:
    def body(group: Group) -> str:
        model = net()
        lists = [{"params": list(part.parameters())} for part in model]
        both = [torch.optim.SGD(lists[:2], lr=0.1), torch.optim.SGD(lists[2:], lr=0.1)]
        if group.rank:
            both[0].param_groups[1]["lr"] = 0.2
        with pytest.raises(JobError) as error:
            ReplicaConsistency(group, 1, dict, both).check(1)
        return str(error.value)

    assert "learning rate (optimizer 0, group 1) differs" in run_ranks(2, body)[0]


@ranks
def test_never() -> None:
    def body(group: Group) -> bool:
        own = {"w": torch.tensor(float(group.rank))}
        ReplicaConsistency(group, 0, lambda: own, []).check(0)
        with pytest.raises(JobError, match=r"at the start rank 0 on .*: w differs"):
            ReplicaConsistency(group, 5, lambda: own, []).check(0)
        return True

    assert run_ranks(2, body) == [True, True]


@ranks
def test_of_several_hosts_one_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Group, "hosts", lambda group: ["a", "b"])
    assert "leave that host out" in looked(2, lambda group, model, optimizer: _spoil(group, model))


def _spoil(group: Group, model: nn.Module) -> None:
    if group.rank:
        flip_a_bit(model)
