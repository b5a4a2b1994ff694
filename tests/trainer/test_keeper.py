import math
from pathlib import Path

import pytest
import torch
from torch import nn

from paceline.checkpoint.store import SnapshotStore
from paceline.dist.environment import Placement
from paceline.dist.group import Group
from paceline.metrics.counters import StepCounters
from paceline.trainer.keeper import SnapshotKeeper
from paceline.trainer.parts import Parts


def keeper_of(model: nn.Module, directory: Path) -> SnapshotKeeper:
    return SnapshotKeeper(
        store=SnapshotStore(directory, keep_last=2),
        report=print,
        group=Group(Placement(), torch.device("cpu"), "gloo"),
        parts=Parts(models={"model": model}),
        counters=StepCounters(),
        scaler=None,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_one_weight_that_isnt_finite_is_found(
    tmp_path: Path, dtype: torch.dtype, bad: float
) -> None:
    model = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7)).to(dtype)
    keeper = keeper_of(model, tmp_path)
    assert keeper.weights_are_finite()
    for parameter in model.parameters():
        flat = parameter.detach().view(-1)
        for position in (0, flat.numel() // 2, flat.numel() - 1):
            before = flat[position].clone()
            flat[position] = bad
            assert not keeper.weights_are_finite()
            flat[position] = before
    assert keeper.weights_are_finite()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_whose_norm_overflows_are_finite(tmp_path: Path, dtype: torch.dtype) -> None:
    model = nn.Linear(40, 30).to(dtype)
    for parameter in model.parameters():
        parameter.detach().fill_(torch.finfo(dtype).max)
    assert keeper_of(model, tmp_path).weights_are_finite()


def test_a_model_without_weights_is_finite(tmp_path: Path) -> None:
    assert keeper_of(nn.ReLU(), tmp_path).weights_are_finite()
