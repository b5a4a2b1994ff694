from collections import UserDict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.data.batch import Batch, map_tensors, move_whole, pieces, to_channels_last
from paceline.errors import DataError, UsageError


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


@dataclass(frozen=True, slots=True)
class Example:
    x: Tensor
    names: list[str]


@dataclass
class Checked:
    """Can't be made again of what it holds."""

    x: Tensor

    def __post_init__(self) -> None:
        self.deep = {"more": self.x}
        self.x = self.x.clone() if self.x.sum() == 21 else self.x / 0


class Graphs:
    """A batch of a library's own, which moves itself."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> "Graphs":
        return Graphs(self.x.to(device))


CONTENTS: list[object] = [
    torch.arange(7),
    (torch.arange(7), torch.arange(7) + 1),
    [torch.arange(7), "a word", None],
    {"x": torch.arange(7), "deep": {"y": (torch.arange(7),)}},
    Pair(torch.arange(7), "a word"),
    Encoding({"x": torch.arange(7)}),
    Example(torch.arange(7), ["a word"]),
    Checked(torch.arange(7)),
    [Example(torch.arange(7), [])],
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


def test_what_moves_itself_is_moved_whole() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])
    content = {"graphs": Graphs(torch.ones(2)), "packed": packed, "x": torch.ones(2)}
    left = map_tensors(content, lambda tensor: tensor * 2, lambda value: value)
    assert isinstance(left, dict)
    assert left["graphs"] is content["graphs"]
    assert left["packed"] is packed
    moved = move_whole(left, torch.device("meta"))
    assert isinstance(moved, dict)
    assert moved["graphs"].x.is_meta
    assert moved["packed"].data.is_meta
    assert not moved["packed"].batch_sizes.is_meta  # torch wants them on the CPU
    assert moved["x"].tolist() == [2, 2]


def test_pieces_cut_all_that_has_an_element_for_each_sample() -> None:
    content = (
        [torch.full((3, size), size) for size in range(1, 6)],  # images of other sizes
        Example(torch.arange(5), list("abcde")),
        {"id": tuple(range(5)), "name": "n", "none": None, "scale": torch.tensor(2.0)},
    )
    first, second = pieces(Batch(content, 5, 5, np.arange(5)), 3)
    assert [len(part) for part in first.content[0]] == [3, 3, 3]  # type: ignore[index]
    assert isinstance(second.content, tuple)
    images, example, rest = second.content
    assert [tuple(image.shape) for image in images] == [(3, 4), (3, 5)]
    assert example.x.tolist() == [3, 4]
    assert example.names == ["d", "e"]
    assert rest == {"id": (3, 4), "name": "n", "none": None, "scale": torch.tensor(2.0)}


@pytest.mark.parametrize(
    "content",
    [
        torch.zeros(9, 4),
        (torch.zeros(4), torch.zeros(9)),
        {"x": np.zeros(3)},
        Graphs(torch.ones(4)),
    ],
)
def test_what_cannot_be_cut_is_refused(content: object) -> None:
    with pytest.raises(UsageError, match="first dimension"):
        list(pieces(Batch(content, 4, 4, np.arange(4)), 2))


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
