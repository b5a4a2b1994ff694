"""A network, batches cut into shards, and the sum of their gradients written down naively."""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from paceline.gradient_sync.ordered.reduce import OrderedSum

Found = dict[str, Tensor | None]
Loss = Callable[[nn.Module, int], Tensor]
"""(model, shard) -> loss."""


class Net(nn.Module):
    """Convolutions, of which weights may be channels-last, and parameters of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 7, 3)
        self.second = nn.Conv2d(7, 5, 3)
        self.spare = nn.Linear(3, 3)
        self.head = nn.Linear(5 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.second(self.first(images).relu()).relu()
        scores: Tensor = self.head(hidden.flatten(1))
        return scores


def fresh_net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def loss_of(model: nn.Module, shard: int, step: int = 0) -> Tensor:
    """Make the shard's samples, 1 to 3 of them, and sum their squared scores."""
    generator = torch.Generator().manual_seed(1000 * step + shard)
    images = torch.randn(1 + shard % 3, 3, 8, 8, generator=generator)
    loss: Tensor = model(images).square().sum() / 7
    return loss


def gradients_of(parameters: Mapping[str, nn.Parameter]) -> Found:
    return {n: None if p.grad is None else p.grad.clone() for n, p in parameters.items()}


def nested_sum(shares: Sequence[Tensor]) -> Tensor:
    """Sum along the tree, from the top down; all shards are there."""
    if len(shares) == 1:
        return shares[0]
    half = 1 << (len(shares) - 1).bit_length() - 1
    return nested_sum(shares[:half]) + nested_sum(shares[half:])


def expected_sums(
    model: nn.Module, shards: int, loss: Loss = loss_of, empty: Sequence[int] = ()
) -> Found:
    """Compute every shard's gradients by themselves and sum them."""
    parameters = dict(model.named_parameters())
    found: list[Found] = []
    for shard in range(shards):
        model.zero_grad()
        if shard not in empty:
            loss(model, shard).backward()
        found.append(gradients_of(parameters))
    model.zero_grad()
    sums: Found = {}
    for name, parameter in parameters.items():
        if all(each[name] is None for each in found):
            sums[name] = None
            continue
        zeros = torch.zeros_like(parameter)
        shares = [zeros if (g := each[name]) is None else g for each in found]
        sums[name] = nested_sum([share.detach() for share in shares])
    return sums


def run_step(
    ordered: OrderedSum, model: nn.Module, loss: Loss = loss_of, empty: Sequence[int] = ()
) -> tuple[str, ...]:
    """Take one step without the update."""
    ordered.begin_step(dict(model.named_parameters()))
    for shard in ordered.own_shards:
        if shard in empty:
            ordered.skip(shard)
            continue
        value = loss(model, shard)
        ordered.open_shard(shard)
        value.backward()
        ordered.close_shard()
    return ordered.finish()


def assert_same_bits(found: Mapping[str, Tensor | None], wanted: Found) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        got = found[name]
        assert (got is None) == (value is None), name
        if value is not None and got is not None:
            assert raw(got) == raw(value), name


def raw(tensor: Tensor) -> bytes:
    """Give the bits; of any NaN the same."""
    quiet = tensor.detach().masked_fill(tensor.isnan(), math.nan).contiguous()
    return quiet.view(torch.uint8).numpy().tobytes() if tensor.ndim else str(quiet).encode()
