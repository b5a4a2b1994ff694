import torch

from paceline.models.mnist_cnn import MnistCnn


def test_parameters_and_output() -> None:
    model = MnistCnn()
    assert sum(parameter.numel() for parameter in model.parameters()) == 225_226
    assert model(torch.rand(3, 1, 28, 28)).exp().sum(dim=1).allclose(torch.ones(3))


def test_features_are_1600() -> None:
    assert MnistCnn().features(torch.rand(2, 1, 28, 28)).shape == (2, 64, 5, 5)
