import math

import pytest
import torch
from torch import Tensor, nn

from paceline.training.snapshots.model_weights import are_finite


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_weight_that_isnt_finite_is_found(dtype: torch.dtype, bad: float) -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7)).to(dtype)
    assert are_finite(weights(model))
    for parameter in weights(model):
        flat = parameter.view(-1)
        for position in (0, flat.numel() // 2, flat.numel() - 1):
            before = flat[position].clone()
            flat[position] = bad
            assert not are_finite(weights(model))
            flat[position] = before
    assert are_finite(weights(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_whose_norm_overflows_are_finite(dtype: torch.dtype) -> None:
    model = nn.Linear(40, 30).to(dtype)
    for parameter in weights(model):
        parameter.fill_(torch.finfo(dtype).max)
    assert are_finite(weights(model))


def test_weights_of_two_types() -> None:
    mixed = [torch.ones(3), torch.ones(3, dtype=torch.bfloat16)]
    assert are_finite(mixed)
    mixed[1][2] = math.nan
    assert not are_finite(mixed)


def test_no_weights_are_finite() -> None:
    assert are_finite([])
