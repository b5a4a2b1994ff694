"""A model with parts that may be left out, ways to use it, and its gradients."""

import torch
from torch import Tensor, nn

from paceline.distributed.group import Group

ROWS = 6
"""A multiple of every number of workers: means of equal shares are the mean of all."""


class Branches(nn.Module):
    """Has a part that may be left out, a submodule of its own use, and a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.head = nn.Linear(4, 2)
        self.spare = nn.Linear(4, 2)
        self.register_buffer("mask", torch.tensor([True, False]))

    def forward(self, inputs: Tensor, *, spare: bool = False) -> dict[str, Tensor]:
        hidden = self.body(inputs).tanh()
        return {"scores": (self.spare if spare else self.head)(hidden)}

    def encode(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.body(inputs).tanh()
        return hidden


def rows_of(group: Group, step: int = 0) -> Tensor:
    """This worker's share of the step's rows."""
    rows = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(step))
    return rows.chunk(group.world_size)[group.rank]


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def bits(found: dict[str, Tensor | None]) -> dict[str, bytes | None]:
    return {n: None if v is None else v.numpy().tobytes() for n, v in found.items()}


def fresh(seed: int = 0) -> Branches:
    torch.manual_seed(seed)
    return Branches()


def assert_close(
    found: dict[str, Tensor | None],
    expected: dict[str, Tensor | None],
    *,
    tolerance: float = 1e-7,
) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        got = found[name]
        assert (got is None) == (value is None), name
        if value is not None and got is not None:
            torch.testing.assert_close(got, value, rtol=1e-5, atol=tolerance, msg=name)


def scores_of(model: nn.Module, rows: Tensor, *, spare: bool = False) -> Tensor:
    outputs: dict[str, Tensor] = model(rows, spare=spare)
    return outputs["scores"]


def both(model: Branches, rows: Tensor, step: int) -> Tensor:
    """Use all parameters."""
    first, second = scores_of(model, rows), scores_of(model, rows, spare=True)
    return (first.square() + second.sin()).mean()


def one_head(model: Branches, rows: Tensor, step: int) -> Tensor:
    return scores_of(model, rows).square().mean()
