"""Layers without a deterministic backward pass on CUDA are named before training."""

import pytest
import torch
from torch import nn

from paceline.errors import UsageError
from paceline.recipes.imagefolder_vgg19 import _build
from paceline.training.nondeterministic import refuse_nondeterministic


def test_such_layers_are_named_with_their_place() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.Sequential(nn.AdaptiveAvgPool2d((3, 3))), nn.AdaptiveMaxPool2d(1)
    )
    with pytest.raises(UsageError, match=r"1\.0 \(AdaptiveAvgPool2d\), 2 \(AdaptiveMaxPool2d\)"):
        refuse_nondeterministic(model)


@pytest.mark.parametrize(
    "layer",
    [nn.AdaptiveAvgPool2d(1), nn.AdaptiveAvgPool2d((1, 1)), nn.MaxPool2d(2), nn.ReflectionPad2d(1)],
)
def test_others_are_not(layer: nn.Module) -> None:
    refuse_nondeterministic(nn.Sequential(nn.Conv2d(1, 2, 3), layer))


def test_nothing_flows_back_through_what_stands_behind_frozen_layers() -> None:
    frozen = nn.Conv2d(1, 2, 3).requires_grad_(False)
    refuse_nondeterministic(nn.Sequential(frozen, nn.AdaptiveAvgPool2d(3), nn.Linear(2, 2)))


@pytest.mark.parametrize(("size", "pools"), [(224, False), (255, False), (192, True), (32, True)])
def test_vgg_pools_only_where_that_changes_something(size: int, pools: bool) -> None:
    with torch.device("meta"):  # 130 million weights that nobody asks for
        model = _build("vgg11", "none", 3, 8, size)
    assert isinstance(model.avgpool, nn.AdaptiveAvgPool2d) is pools
    seven = torch.randn(2, 3, 7, 7)
    assert torch.equal(nn.AdaptiveAvgPool2d((7, 7))(seven), seven)
