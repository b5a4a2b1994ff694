import pytest
import torch
from torch import Tensor, nn

from paceline.distributed.group import Group
from paceline.distributed.work_division import Division
from paceline.training.components import Components
from paceline.training.sync.buffer_averaging import BufferAverager
from tests.support.ranks import run_ranks


def made(group: Group, shards: int | None) -> tuple[nn.BatchNorm1d, BufferAverager]:
    norm = nn.BatchNorm1d(2)
    division = Division.of(shards, group.world_size)
    return norm, BufferAverager(Components(models={"model": norm}), group, division)


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_worker_gets_the_average_and_its_own_back(world_size: int) -> None:
    def body(group: Group) -> tuple[list[float], list[float]]:
        norm, statistics = made(group, None)
        norm.get_buffer("running_mean").fill_(float(group.rank))
        with statistics.averaged_buffers():
            lent = norm.get_buffer("running_mean").tolist()
        return lent, norm.get_buffer("running_mean").tolist()

    mean = (world_size - 1) / 2
    for rank, (lent, own) in enumerate(run_ranks(world_size, body)):
        assert lent == [mean] * 2
        assert own == [float(rank)] * 2


@pytest.mark.ranks
@pytest.mark.slow
def test_shards_give_the_same_rows_on_any_number_of_workers() -> None:
    def body(group: Group) -> tuple[Tensor, dict[str, Tensor]]:
        norm, statistics = made(group, 5)
        for shard in Division.of(5, group.world_size).parts_of(group.rank):
            statistics.enter(shard)
            norm.get_buffer("running_var").mul_(1.0 / (shard + 3))
            norm.get_buffer("num_batches_tracked").add_(5 - shard)
        rows = statistics.gathered()
        statistics.restore(rows)
        assert torch.equal(statistics.gathered(), rows)
        return rows, statistics.averaged(rows)

    first, average = run_ranks(1, body)[0]
    assert first.shape == (5, 5)
    assert average["num_batches_tracked"] == 5  # of the first shard, which never lacks samples
    for world_size in (2, 3, 4, 5):
        for rows, mean in run_ranks(world_size, body):
            assert torch.equal(rows, first)
            assert all(torch.equal(mean[name], average[name]) for name in average)


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.zeros(3))


@pytest.mark.ranks
@pytest.mark.parametrize(("shards", "follows_samples"), [(None, True), (None, False), (2, True)])
def test_own_buffers_that_follow_a_workers_samples_are_named_once(
    shards: int | None, follows_samples: bool
) -> None:
    def body(group: Group) -> list[str]:
        model, said = Codebook(), list[str]()
        components = Components(models={"model": model})
        division = Division.of(shards, group.world_size)
        statistics = BufferAverager(components, group, division, said.append)
        model.get_buffer("codes").add_(group.rank if follows_samples else 1)
        for _ in range(2):
            with statistics.averaged_buffers():
                pass
        return said

    for said in run_ranks(2, body):
        assert len(said) == (follows_samples and shards is None)
        assert all("codes" in line and "--shards 2" in line for line in said)
