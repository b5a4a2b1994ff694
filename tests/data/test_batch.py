from collections import UserDict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.data.batch import Batch, map_tensors, pieces, to_channels_last
from paceline.errors import DataError


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


class Pair(NamedTuple):
    inputs: Tensor
    name: str


class Encoding(UserDict[str, Tensor]):
    """A mapping type of a library."""


CONTENTS: list[object] = [
    torch.arange(7),
    (torch.arange(7), torch.arange(7) + 1),
    [torch.arange(7), "a word", None],
    {"x": torch.arange(7), "deep": {"y": (torch.arange(7),)}},
    Pair(torch.arange(7), "a word"),
    Encoding({"x": torch.arange(7)}),
]


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: type(content).__name__)
def test_every_form_of_a_batch_is_kept(content: object) -> None:
    doubled = map_tensors(content, lambda tensor: tensor * 2)
    assert type(doubled) is type(content)
    found: list[Tensor] = []
    map_tensors(doubled, lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    expected: list[Tensor] = []
    map_tensors(content, lambda tensor: expected.append(tensor) or tensor)  # type: ignore[func-returns-value]
    assert found
    assert all(torch.equal(f, 2 * e) for f, e in zip(found, expected, strict=True))


@pytest.mark.parametrize("most", [1, 3, 7, 8])
def test_pieces_are_the_batch_again(most: int) -> None:
    batch = Batch({"x": torch.arange(7), "name": "n"}, 7, 20, np.arange(10, 17))
    cut = list(pieces(batch, most))
    assert [piece.local for piece in cut][:-1] == [most] * (len(cut) - 1)
    assert sum(piece.local for piece in cut) == 7
    assert [piece.last for piece in cut] == [False] * (len(cut) - 1) + [True]
    assert {piece.total for piece in cut} == {20}
    joined = torch.cat([piece.content["x"] for piece in cut])  # type: ignore[index]
    assert joined.tolist() == list(range(7))
    assert np.concatenate([piece.indices for piece in cut]).tolist() == list(range(10, 17))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ((torch.ones(1),), "a tuple of Tensor"),
        ((torch.ones(1), "word"), "a tuple of Tensor, str"),
        ({"x": torch.ones(1)}, "a dict with x"),
        (torch.ones(1), "a Tensor"),
    ],
)
def test_what_is_no_pair_is_described(content: object, said: str) -> None:
    with pytest.raises(DataError, match=f"are {said}, but"):
        Batch(content, 1, 1, np.arange(1)).pair()
