"""Half precision on the wire: the sums are those of rounded gradients, and nothing else changes."""

import pytest
import torch
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.gradient_sync.compression import Compression
from paceline.gradient_sync.network_model import ring_bytes
from paceline.gradient_sync.replica import Replica
from tests.support.branches import Branches, bits, gradients, scores_of
from tests.support.ranks import run_ranks
from tests.support.replicas import Gradients, train

HALF = torch.bfloat16
pytestmark = pytest.mark.ranks


def wide_net() -> nn.Module:
    """3 MB of gradients: they travel in several buckets."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 600), nn.Tanh(), nn.Linear(600, 600), nn.Linear(600, 600))


def local_gradients(model: nn.Module, group: Group, step: int) -> dict[str, Tensor]:
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + group.rank))
    model(inputs).square().mean().backward()
    return {name: g for name, g in gradients(model).items() if g is not None}


def averages(group: Group, compression: Compression | None) -> list[dict[str, Tensor]]:
    """Two steps: the first goes through a replay, the second straight through the hook."""
    model = wide_net()
    replica = Replica(model, group)
    replica.compression = compression
    found = []
    for step in range(2):
        model.zero_grad()
        local_gradients(model, group, step)
        replica.finish_backward()
        found.append({n: g for n, g in gradients(model).items() if g is not None})
    return found


def by_hand(group: Group) -> list[dict[str, Tensor]]:
    """Round each worker's share and add them up; of two workers the order doesn't matter."""
    found = []
    for step in range(2):
        model = wide_net()
        own = local_gradients(model, group, step)
        rows = {n: group.gather_rows((g / group.world_size).flatten()) for n, g in own.items()}
        summed = {n: r.to(HALF).float().sum(0).to(HALF).float() for n, r in rows.items()}
        found.append({n: summed[n].view(own[n].shape) for n in own})
    return found


@pytest.mark.slow
def test_the_average_is_that_of_rounded_gradients_bit_by_bit() -> None:
    expected = run_ranks(2, by_hand)
    for found in run_ranks(2, averages, Compression()):
        for got, wanted in zip(found, expected[0], strict=True):
            assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_three_workers_have_the_same_bits_close_to_the_average() -> None:
    exact, *_ = run_ranks(3, averages, None)
    first, *others = run_ranks(3, averages, Compression())
    for other in others:
        assert [bits(dict(step)) for step in other] == [bits(dict(step)) for step in first]
    for got, wanted in zip(first, exact, strict=True):
        for name, value in wanted.items():
            error = (got[name] - value).norm() / value.norm()
            assert 0 < error < 3 * torch.finfo(HALF).eps, name


def test_parameters_that_only_some_workers_use_count_with_zero() -> None:
    def body(group: Group) -> list[Gradients]:
        def use(model: Branches, rows: Tensor, step: int) -> Tensor:
            return scores_of(model, rows, spare=group.rank == 0).sum()

        return train(group, use, compression=Compression(), steps=3)

    first, second = run_ranks(2, body)
    for mine, theirs in zip(first, second, strict=True):
        assert bits(mine) == bits(theirs)
        spare = mine["spare.weight"]
        assert spare is not None
        assert bool(spare.any())


def test_what_has_no_more_bytes_than_the_wire_is_left_alone() -> None:
    half = Compression()
    assert half.wire_dtype(torch.float64) == torch.bfloat16
    assert half.wire_dtype(torch.float32) == torch.bfloat16
    assert half.wire_dtype(torch.float16) == torch.float16


def test_bytes_on_the_wire() -> None:
    def body(group: Group, compression: Compression | None) -> float:
        model = nn.Linear(100, 10, bias=False)
        replica = Replica(model, group)
        replica.compression = compression
        model.weight.requires_grad_(True)
        return replica.wire_bytes

    assert run_ranks(1, body, Compression()) == [0.0]
    assert run_ranks(2, body, None) == [4000.0] * 2
    assert run_ranks(2, body, Compression()) == [2000.0] * 2
    assert ring_bytes(300, 3) == 400
