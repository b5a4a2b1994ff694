import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.dist.group import Group
from paceline.sync.allreduce import replicate, without_sync
from tests.support.ranks import run_ranks

CPU = torch.device("cpu")


def test_one_worker_trains_the_model_itself() -> None:
    model = nn.Linear(2, 2)
    assert replicate(model, 1, CPU) is model
    with without_sync(model):
        pass


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 3])
def test_gradients_are_averaged_and_buffers_left_alone(world_size: int) -> None:
    def body(group: Group) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(group.rank)  # rank 0's weights are what all start from
        linear, norm = nn.Linear(3, 2), nn.BatchNorm1d(2)
        model = nn.Sequential(linear, norm)
        replica = replicate(model, group.world_size, CPU)
        assert isinstance(replica, DistributedDataParallel)
        for _ in range(2):  # a broadcast would come before the second pass
            replica(torch.randn(5, 3) + group.rank).square().sum().backward()
        gradient, mean = linear.weight.grad, norm.running_mean
        assert gradient is not None
        assert mean is not None
        return gradient.clone(), linear.weight.detach(), mean

    results = run_ranks(world_size, body)
    for gradient, weight, mean in results[1:]:
        assert torch.equal(gradient, results[0][0])
        assert torch.equal(weight, results[0][1])
        assert not torch.equal(mean, results[0][2])


@pytest.mark.ranks
def test_gradients_stay_local_without_sync() -> None:
    def body(group: Group) -> tuple[float, float]:
        model = nn.Linear(1, 1, bias=False)
        replica = replicate(model, group.world_size, CPU)
        inputs = torch.full((1, 1), float(group.rank))
        with without_sync(replica):
            replica(inputs).sum().backward()
        assert model.weight.grad is not None
        local = float(model.weight.grad)
        replica(inputs).sum().backward()
        return local, float(model.weight.grad)

    # Local sums 0 and 1 a pass; the last pass averages what has come together: (0 + 2) / 2.
    assert run_ranks(2, body) == [(0.0, 1.0), (1.0, 1.0)]
