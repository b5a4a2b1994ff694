import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.distributed.group import Group
from paceline.gradient_sync.batchnorm import synchronise_batchnorm
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.ranks
CPU, GPU = torch.device("cpu"), torch.device("cuda")


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
    Case(shape=(4, 3, 3), shares=(0, 5, 2)),
    Case(shape=(4, 3, 3), shares=(3, 0), tracks=False),
]


@dataclass(kw_only=True)
class Passed:
    outputs: Tensor
    gradient: Tensor
    parameter_gradients: list[Tensor]
    buffers: dict[str, Tensor]


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def kernels_on_cpus() -> None:
    """Give the CPU the kernels that torch has for GPUs alone, by the formulas of BatchNorm."""
    library = torch.library.Library("aten", "IMPL", "CPU")
    LIBRARIES.append(library)

    def over_channels(x: Tensor) -> tuple[list[int], list[int]]:
        return [0, *range(2, x.dim())], [1, -1, *[1] * (x.dim() - 2)]

    def stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(x.float(), over_channels(x)[0], correction=0)
        return mean, (variance + eps).rsqrt()

    def gather(
        x: Tensor,
        means: Tensor,
        scales: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        counts: Tensor,
    ) -> tuple[Tensor, Tensor]:
        shares, n = (counts / counts.sum())[:, None], counts.sum()
        mean = (shares * means).sum(0)
        variance = (shares * (scales**-2 - eps + (means - mean) ** 2)).sum(0)
        if running_mean is not None and running_var is not None:
            running_mean.mul_(1 - momentum).add_(momentum * mean)
            running_var.mul_(1 - momentum).add_(momentum * variance * n / (n - 1))
        return mean, (variance + eps).rsqrt()

    def normalised(
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        scale: Tensor,
        eps: float,
    ) -> Tensor:
        shape = over_channels(x)[1]
        normal = (x - mean.view(shape)) * scale.view(shape)
        if weight is None or bias is None:
            return normal.to(x.dtype)
        return (normal * weight.view(shape) + bias.view(shape)).to(x.dtype)

    def reduce(
        dy: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None, *_: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims, shape = over_channels(x)
        sum_dy, sum_dy_xmu = dy.sum(dims), (dy * (x - mean.view(shape))).sum(dims)
        return sum_dy, sum_dy_xmu, sum_dy_xmu * scale, sum_dy.clone()

    def backward(
        dy: Tensor,
        x: Tensor,
        mean: Tensor,
        scale: Tensor,
        weight: Tensor | None,
        sum_dy: Tensor,
        sum_dy_xmu: Tensor,
        counts: Tensor,
    ) -> Tensor:
        shape, n = over_channels(x)[1], counts.sum()
        centred = dy - (sum_dy / n).view(shape)
        rest = (x - mean.view(shape)) * (scale**2 * sum_dy_xmu / n).view(shape)
        factor = scale if weight is None else scale * weight
        return (centred - rest) * factor.view(shape)

    for name, function in (
        ("batch_norm_stats", stats),
        ("batch_norm_gather_stats_with_counts", gather),
        ("batch_norm_elemt", normalised),
        ("batch_norm_backward_reduce", reduce),
        ("batch_norm_backward_elemt", backward),
    ):
        library.impl(name, function)


LIBRARIES: list[torch.library.Library] = []
"""Kept: what one adds goes with it."""


class NothingFetched(TorchDispatchMode):
    """Fails where a value is taken from the device, or a shape depends on one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._overloadpacket.__name__ not in ("_local_scalar_dense", "nonzero")
        return func(*args, **(kwargs or {}))


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
@pytest.mark.parametrize("by", ["sums", "kernels", "kernels and sums"])
def test_equals_batchnorm_over_the_whole_batch(case: Case, by: str) -> None:
    whole = two_steps(case.layer(), slice(None), case)

    def body(group: Group) -> bool:
        if group.world_size == 1:  # a group of its own, since torch has none
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        device = CPU if by == "sums" else GPU
        layer = synchronise_batchnorm(case.layer(), device, by_sum="sums" in by)
        if device is GPU:
            kernels_on_cpus()
        start = sum(case.shares[: group.rank])
        mine = slice(start, start + case.shares[group.rank])
        with NothingFetched() if device is GPU else nullcontext():  # type: ignore[no-untyped-call]  # torch's
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


def penalty_of(layer: nn.Module, inputs: Tensor, weights: Tensor) -> list[Tensor]:
    """Give the parameters' gradients of a penalty on the inputs' gradients."""
    inputs = inputs.clone().requires_grad_()
    (slopes,) = torch.autograd.grad(
        (layer(inputs) * weights).square().sum(), inputs, create_graph=True
    )
    slopes.square().sum().backward()
    return [p.grad for p in layer.parameters() if p.grad is not None]


def test_a_penalty_on_gradients_is_that_of_the_whole_batch() -> None:
    case = CASES[2]
    inputs, weights = case.inputs(1)
    whole = penalty_of(case.layer(), inputs, weights)

    def body(group: Group) -> None:
        start = sum(case.shares[: group.rank])
        mine = slice(start, start + case.shares[group.rank])
        layer = synchronise_batchnorm(case.layer(), CPU)
        for ours, theirs in zip(penalty_of(layer, inputs[mine], weights[mine]), whole, strict=True):
            torch.testing.assert_close(group.sum_(ours), theirs, rtol=1e-4, atol=1e-4)
        # The kernels of GPUs can't; wrong figures would be worse than an error.
        kernels_on_cpus()
        with pytest.raises(RuntimeError, match="differentiate twice"):
            penalty_of(synchronise_batchnorm(case.layer(), GPU), inputs[mine], weights[mine])

    run_ranks(2, body)


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


@pytest.mark.slow
def test_no_sum_over_workers_is_compiled() -> None:
    """Inductor computes other numbers where several of them are in one graph (torch 2.15)."""

    def body(group: Group) -> None:
        graphs: list[torch.fx.GraphModule] = []

        def backend(graph: torch.fx.GraphModule, _inputs: list[Tensor]) -> Callable[..., Any]:
            graphs.append(graph)
            return graph.forward

        layers = [nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)]
        net = synchronise_batchnorm(nn.Sequential(*layers), group.device)
        inputs = torch.randn(3, 4, 2, 2, generator=torch.Generator().manual_seed(group.rank))
        compiled = torch.compile(net, backend=backend)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # dynamo looks at `.grad` of what isn't a leaf
            torch.testing.assert_close(compiled(inputs), net(inputs))
        names = [str(node.target) for graph in graphs for node in graph.graph.nodes]
        assert any("square" in name for name in names)  # the rest is compiled
        assert not [name for name in names if "reduce" in name or "c10d" in name]

    run_ranks(2, body)
