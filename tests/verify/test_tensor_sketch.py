"""Marks of tensors: hashes that tell bits apart, sketches that tell how far."""

import math

import pytest
import torch
from torch import nn

from paceline.verify.tensor_sketch import (
    content_hashes,
    contents_match,
    distance,
    identity,
    mark,
    relative_distance,
)


@pytest.mark.parametrize("shape", [(3,), (7, 11), (70_000,), (300, 500)])
@pytest.mark.parametrize("apart", [1e-7, 1e-3, 1.0])
def test_distances_are_estimated(shape: tuple[int, ...], apart: float) -> None:
    generator = torch.Generator().manual_seed(3)
    one = torch.randn(shape, generator=generator, dtype=torch.float64)
    other = one + apart * torch.randn(shape, generator=generator, dtype=torch.float64)
    true = float((one - other).norm())
    assert distance(mark(one, whole=True), mark(other, whole=True)) == pytest.approx(true, rel=0.6)
    assert mark(one, whole=True).norm == pytest.approx(float(one.norm()))


def test_the_estimate_is_right_on_average() -> None:
    generator = torch.Generator().manual_seed(5)
    ratios = []
    for _ in range(60):
        change = torch.randn(5000, generator=generator)
        nothing = torch.zeros(5000)
        found = distance(mark(change, whole=True), mark(nothing, whole=True))
        ratios.append((found / float(change.norm())) ** 2)
    assert sum(ratios) / len(ratios) == pytest.approx(1, abs=0.08)


def test_one_element_is_not_lost() -> None:
    one = torch.randn(200_000)
    other = one.clone()
    other[123_456] += 0.5
    assert distance(mark(one, whole=True), mark(other, whole=True)) == pytest.approx(0.5, rel=1e-4)


def test_hashes_tell_bits_types_and_shapes_apart() -> None:
    tensors = [
        torch.zeros(4),
        -torch.zeros(4),
        torch.zeros(2, 2),
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(0),
        torch.zeros(4, dtype=torch.bfloat16),
    ]
    assert len({mark(t, whole=False).sha256 for t in tensors}) == len(tensors)
    wide = torch.arange(12.0).reshape(3, 4)
    assert mark(wide.T, whole=True) == mark(wide.T.contiguous(), whole=True)
    assert math.isnan(mark(wide, whole=False).norm)


def test_lists_are_compared_by_their_common_size() -> None:
    large, small = torch.full((100,), 10.0), torch.ones(1)
    moved = mark(small * 2, whole=True)
    pairs = [
        (mark(large, whole=True), mark(large, whole=True)),
        (mark(small, whole=True), moved),
    ]
    assert relative_distance(pairs) == pytest.approx(1 / math.sqrt(100 * 100 + 1), rel=1e-6)
    assert relative_distance(pairs[:1]) == 0.0
    assert relative_distance([(mark(small * 0, whole=True), moved)]) == math.inf


@pytest.mark.parametrize("end", [True, False], ids=["right", "left"])
@pytest.mark.parametrize("value", [0, 2, 50_256])
def test_padding_changes_no_sample(value: int, end: bool) -> None:
    def padded(sequences: torch.Tensor, by: int, fill: int) -> torch.Tensor:
        return nn.functional.pad(sequences, (0, by) if end else (by, 0), value=fill)

    tokens = torch.tensor([[7, 3, 9], [5, 4, value]])
    targets = torch.tensor([[3, 9, 2], [4, value, 6]])

    def batch(by: int) -> tuple[torch.Tensor, ...]:
        mask = padded(torch.ones_like(tokens), by, 0)
        return padded(tokens, by, value), padded(targets, by, -100), mask

    for one, other in ((0, 2), (1, 3), (3, 0)):
        pairs = zip(content_hashes(batch(one), 2), content_hashes(batch(other), 2), strict=True)
        assert all(contents_match(a, b) for a, b in pairs), (one, other)
    first, second = content_hashes(batch(1), 2)
    assert not contents_match(first, second)
    assert (identity(first) == identity(content_hashes(batch(3), 2)[0])) == (value == 0)


def test_a_moved_image_looks_otherwise() -> None:
    image = torch.zeros(1, 4, 4)
    image[:, 1, 1] = 0.5
    for shape in ((1, 4, 4), (1, 1, 4, 4), (1, 16)):
        one, moved = image.reshape(shape), image.roll(1, -2).reshape(shape)
        assert not contents_match(content_hashes(one, 1)[0], content_hashes(moved, 1)[0])
    assert contents_match("aa", "aa")
    assert not contents_match("aa", "bb")
