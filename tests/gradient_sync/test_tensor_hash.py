"""A hash of a tensor's bits: any change of any element, type or place shows."""

import numpy as np
import pytest
import torch

from paceline.gradient_sync import replica_consistency
from paceline.gradient_sync.replica_consistency import hash_bits

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8)


@pytest.mark.parametrize("dtype", [*TYPES, torch.bool, torch.complex64], ids=str)
def test_the_same_bits_give_the_same(dtype: torch.dtype) -> None:
    tensor = torch.arange(600).view(3, 4, 50).to(dtype)
    assert hash_bits(tensor) == hash_bits(tensor.clone())
    assert hash_bits(tensor) == hash_bits(tensor.transpose(0, 1).contiguous().transpose(0, 1))
    assert hash_bits(tensor) != hash_bits(tensor.flip(0))
    assert hash_bits(tensor).dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", [0, 1, 77])
def test_every_single_bit_shows(dtype: torch.dtype, place: int) -> None:
    tensor = torch.randn(78).to(dtype)
    width = 8 * tensor.element_size()
    whole = {16: torch.int16, 32: torch.int32, 64: torch.int64}[width]
    hashes = {int(hash_bits(tensor))}
    for bit in range(width):
        other = tensor.clone()
        other.view(whole)[place] ^= 1 << bit if bit < width - 1 else -(1 << bit)
        hashes.add(int(hash_bits(other)))
    assert len(hashes) == width + 1


def test_what_equality_doesnt_see() -> None:
    zero = torch.zeros(3)
    assert hash_bits(zero) != hash_bits(-zero)
    nan = torch.full((3,), torch.nan)
    assert hash_bits(nan) == hash_bits(nan.clone())
    assert hash_bits(zero) != hash_bits(nan)
    x = torch.randn(1000)
    assert hash_bits(x) != hash_bits(-x)  # an even number of flipped bits


def test_by_the_definition_over_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_consistency, "_CHUNK", 100)
    tensor = torch.randn(250)
    words = tensor.numpy().view(np.int32).tolist()
    total = 0
    for begin in (0, 100, 200):
        chunk = words[begin : begin + 100]
        total = total * replica_consistency._NEXT_CHUNK + sum(
            (2 * i + 1) * w for i, w in enumerate(chunk)
        )
    assert int(hash_bits(tensor)) % 2**64 == total % 2**64
    moved = torch.cat([tensor[100:200], tensor[:100], tensor[200:]])
    assert hash_bits(moved) != hash_bits(tensor)


def test_nothing_to_hash() -> None:
    assert int(hash_bits(torch.empty(0, 3))) == 0
    assert int(hash_bits(torch.tensor(0.0))) == 0
    assert int(hash_bits(torch.tensor(1.5))) != 0
