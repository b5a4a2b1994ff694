import pytest
import torch
from torch import Tensor, nn

from paceline.models.wideresnet import WideBlock, WideResNet

BATCHNORM = 2  # parameters of a BatchNorm for each channel


def block(channels_in: int, channels_out: int) -> int:
    """Count a block's parameters by hand."""
    first = 9 * channels_in * channels_out + BATCHNORM * channels_out
    second = 9 * channels_out * channels_out + BATCHNORM * channels_out
    shortcut = (channels_in + 1) * channels_out if channels_in != channels_out else 0
    return first + second + shortcut


@pytest.mark.parametrize(("channels", "total"), [(1, 17_117_466), (3, 17_117_754)])
def test_parameters(channels: int, total: int) -> None:
    found = sum(p.numel() for p in WideResNet(channels).parameters())
    blocks = [(16, 160), (160, 160), (160, 320), (320, 320), (320, 640), (640, 640)]
    by_hand = 9 * channels * 16 + BATCHNORM * 16 + sum(block(*b) for b in blocks) + 641 * 10
    assert found == by_hand == total


@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32)])
def test_shapes_on_the_way(channels: int, side: int) -> None:
    model = WideResNet(channels, width=1).eval()
    shapes, images = [], torch.zeros(2, channels, side, side)
    for layer in model.features:
        images = layer(images)
        if not isinstance(layer, nn.Conv2d | nn.BatchNorm2d | nn.ReLU):
            shapes.append(tuple(images.shape[1:]))
    half, quarter = side // 2, side // 4
    assert shapes == [
        *[(16, side, side)] * 2,
        (16, half, half),
        *[(32, half, half)] * 2,
        (32, quarter, quarter),
        *[(64, quarter, quarter)] * 2,
        (64, 1, 1),
    ]
    assert model.classifier(images).shape == (2, 10)


def test_a_block_is_what_the_formula_says() -> None:
    torch.manual_seed(0)
    made = WideBlock(4, 6, dropout=0.01).eval()
    images = torch.randn(2, 4, 5, 5)
    first, bn1, _, _, second, bn2, _ = made.residual
    assert isinstance(made.shortcut, nn.Conv2d)
    assert made.shortcut.bias is not None
    hidden: Tensor = bn1(first(images)).relu()
    wanted = bn2(second(hidden)).relu() + made.shortcut(images)
    assert torch.equal(made(images), wanted)
    assert (wanted < 0).any(), "no activation follows the sum"
    assert isinstance(WideBlock(4, 4, 0.01).shortcut, nn.Identity)


def test_convolutions_and_dropout() -> None:
    modules = list(WideResNet(dropout=0.3).modules())
    drops = [m.p for m in modules if isinstance(m, nn.Dropout)]
    assert drops == [0.3] * 6
    three = [m for m in modules if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(three) == 13
    assert all(m.bias is None and m.padding == (1, 1) for m in three)
