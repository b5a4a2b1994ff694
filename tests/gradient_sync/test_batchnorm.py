import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore

from paceline.distributed.group import Group
from paceline.gradient_sync.batchnorm import synchronise_batchnorm
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Case:
    shape: tuple[int, ...]
    """Of one sample."""
    shares: tuple[int, ...]
    """Samples of each worker."""
    norm: type[nn.modules.batchnorm._BatchNorm] = nn.BatchNorm2d
    momentum: float | None = 0.1
    affine: bool = True
    tracks: bool = True
    offset: float = 0.0

    def layer(self) -> nn.modules.batchnorm._BatchNorm:
        torch.manual_seed(0)
        layer = self.norm(
            self.shape[0],
            momentum=self.momentum,
            affine=self.affine,
            track_running_stats=self.tracks,
        )
        for parameter in layer.parameters():
            nn.init.uniform_(parameter, 0.5, 1.5)
        return layer

    def inputs(self, seed: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shape = (sum(self.shares), *self.shape)
        inputs = torch.randn(shape, generator=generator) * 2 + self.offset
        return inputs, torch.randn(shape, generator=generator)


CASES = [
    Case(shape=(4, 5, 3), shares=(6,)),
    Case(shape=(4, 5, 3), shares=(4, 4)),
    Case(shape=(4, 5, 3), shares=(5, 2)),
    Case(shape=(3, 2, 2), shares=(1, 4, 2)),
    Case(shape=(7,), shares=(1, 1), norm=nn.BatchNorm1d),
    Case(shape=(7, 4), shares=(3, 2), norm=nn.BatchNorm1d, momentum=None),
    Case(shape=(2, 3, 2, 2), shares=(3, 2), norm=nn.BatchNorm3d, affine=False),
    Case(shape=(4, 3, 3), shares=(3, 1), tracks=False),
    Case(shape=(4, 6, 6), shares=(7, 6), offset=30.0),
]


@dataclass(kw_only=True)
class Passed:
    outputs: Tensor
    gradient: Tensor
    parameter_gradients: list[Tensor]
    buffers: dict[str, Tensor]


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def two_steps(layer: nn.Module, mine: slice, case: Case) -> Passed:
    """Pass forward and backward twice; gradients of the workers' weighted outputs together."""
    layer.train()
    for seed in (1, 2):
        inputs, weights = (t[mine] for t in case.inputs(seed))
        inputs = inputs.clone().requires_grad_()
        layer.zero_grad()
        outputs = layer(inputs)
        (outputs * weights).sum().backward()
    assert inputs.grad is not None
    return Passed(
        outputs=outputs.detach(),
        gradient=inputs.grad,
        parameter_gradients=[p.grad for p in layer.parameters() if p.grad is not None],
        buffers=dict(layer.named_buffers()),
    )


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.core_cases(3)
def test_equals_batchnorm_over_the_whole_batch(case: Case) -> None:
    whole = two_steps(case.layer(), slice(None), case)

    def body(group: Group) -> bool:
        if group.world_size == 1:  # a group of its own, since torch has none
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        layer = synchronise_batchnorm(case.layer(), CPU)
        start = sum(case.shares[: group.rank])
        mine = slice(start, start + case.shares[group.rank])
        own = two_steps(layer, mine, case)
        assert_close(own.outputs, whole.outputs[mine])
        assert_close(own.gradient, whole.gradient[mine])
        for ours, theirs in zip(own.parameter_gradients, whole.parameter_gradients, strict=True):
            assert_close(group.sum_(ours), theirs)
        assert own.buffers.keys() == whole.buffers.keys()
        for name, buffer in own.buffers.items():
            assert_close(buffer, whole.buffers[name])
        if group.world_size == 1:
            dist.destroy_process_group()
        return True

    assert all(run_ranks(len(case.shares), body))


@pytest.mark.parametrize("tracks", [True, False])
def test_evaluation_is_not_collective(tracks: bool) -> None:
    def body(group: Group) -> bool:
        torch.manual_seed(group.rank)
        plain = nn.BatchNorm2d(3, track_running_stats=tracks).eval()
        synced = synchronise_batchnorm(copy.deepcopy(plain), CPU).eval()
        for _ in range(group.rank + 1):  # the workers need not evaluate equally many batches
            inputs = torch.randn(4, 3, 2, 2)
            torch.testing.assert_close(synced(inputs), plain(inputs))
        return True

    assert all(run_ranks(2, body))


def test_names_of_weights_stay_and_all_layers_are_replaced() -> None:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm2d(2)))
    names = list(net.state_dict())
    synced = synchronise_batchnorm(net, CPU)
    assert list(synced.state_dict()) == names
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in synced.modules())


def test_half_precision_inputs_keep_their_type() -> None:
    def body(group: Group) -> str:
        layer = synchronise_batchnorm(nn.BatchNorm1d(3), CPU)
        return str(layer(torch.randn(4, 3, dtype=torch.bfloat16)).dtype)

    assert run_ranks(2, body) == ["torch.bfloat16"] * 2
