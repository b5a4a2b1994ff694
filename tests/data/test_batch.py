import pytest
import torch
from torch import nn

from paceline.data.batch import to_channels_last


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_channels_last_is_real(channels: int, layout: torch.memory_format) -> None:
    images = torch.rand(4, channels, 8, 6).contiguous(memory_format=layout)
    found = to_channels_last(images)
    assert torch.equal(found, images)
    assert found.stride() == (8 * 6 * channels, 1, 6 * channels, channels)


def test_a_convolution_keeps_it_for_one_channel() -> None:
    """What it is for: the layers after the first one work in channels-last too."""
    out = nn.Conv2d(1, 8, 3)(to_channels_last(torch.rand(4, 1, 8, 8)))
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert not out.is_contiguous()


def test_one_channel_is_not_copied() -> None:
    images = torch.rand(4, 1, 8, 8)
    assert to_channels_last(images).data_ptr() == images.data_ptr()
