import pytest
import torch
from torch import Tensor, nn

from paceline.dist.group import Group
from paceline.sync.buffers import averaged, gather_buffers, local_buffers, pack, unpack
from tests.support.ranks import run_ranks


class Holder(nn.Module):
    """Buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("coarse", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("unsaved", torch.zeros(2), persistent=False)


def filled(rank: int) -> Holder:
    holder = Holder()
    with torch.no_grad():
        for offset, buffer in enumerate(local_buffers(holder).values()):
            buffer.fill_(rank + offset)
    return holder


def test_only_saved_floating_point_buffers_in_a_fixed_order() -> None:
    assert list(local_buffers(Holder())) == ["coarse", "norm.running_mean", "norm.running_var"]


def test_packing_loses_nothing() -> None:
    source, target = local_buffers(filled(5)), local_buffers(Holder())
    unpack(pack(source), target)
    assert all(map(torch.equal, source.values(), target.values()))


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_buffers_are_gathered_in_rank_order_and_averaged(world_size: int) -> None:
    def body(group: Group) -> tuple[Tensor, Tensor]:
        rows = gather_buffers(local_buffers(filled(group.rank)), group)
        return rows, averaged(rows)

    expected = torch.stack([pack(local_buffers(filled(rank))) for rank in range(world_size)])
    for rows, mean in run_ranks(world_size, body):
        assert torch.equal(rows, expected)
        torch.testing.assert_close(mean, expected.mean(0))


@pytest.mark.ranks
def test_a_model_without_buffers_exchanges_nothing() -> None:
    def body(group: Group) -> tuple[int, ...]:
        rows = gather_buffers(local_buffers(nn.Linear(2, 2)), group)
        unpack(averaged(rows), {})
        return tuple(rows.shape)

    assert run_ranks(2, body) == [(2, 0)] * 2
