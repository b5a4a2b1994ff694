import torch
from torch import nn

from paceline.models.digits_net import DigitsNet


def test_parameters_and_output() -> None:
    model = DigitsNet()
    assert sum(parameter.numel() for parameter in model.parameters()) == 38_378
    assert model(torch.rand(3, 1, 8, 8)).shape == (3, 10)


def test_it_has_the_layers_that_resuming_has_to_bring_back() -> None:
    kinds = {type(module) for module in DigitsNet().modules()}
    assert {nn.BatchNorm2d, nn.Dropout} <= kinds
