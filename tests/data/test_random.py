import torch

from paceline.data.random import uniforms
from paceline.data.splitmix import GOLDEN, MASK, Domain, derive_key, mix64


def reference(seed: int, epoch: int, index: int, stream: int, count: int) -> list[float]:
    key = derive_key(Domain.AUGMENTATION, seed, epoch, stream)
    sample = mix64((index * GOLDEN + key) & MASK)
    return [(mix64((sample + n * GOLDEN) & MASK) >> 40) * 2.0**-24 for n in range(1, count + 1)]


def test_equal_to_python_integers() -> None:
    indices = torch.tensor([0, 1, 5, 2**40])
    drawn = uniforms(3, 2, indices, stream=1, count=3)
    assert drawn.dtype == torch.float32
    assert drawn.tolist() == [reference(3, 2, int(i), 1, 3) for i in indices]


def test_keyed_by_sample_not_by_position() -> None:
    indices = torch.randperm(50)
    everything = uniforms(1, 1, torch.arange(50), stream=0, count=2)
    assert torch.equal(uniforms(1, 1, indices, stream=0, count=2), everything[indices])


def test_seed_epoch_and_stream_change_the_numbers() -> None:
    indices = torch.arange(20)
    drawn = [
        uniforms(seed, epoch, indices, stream, 1)
        for seed, epoch, stream in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    ]
    for left in range(4):
        for right in range(left):
            assert not torch.equal(drawn[left], drawn[right])


def test_uniform() -> None:
    drawn = uniforms(0, 0, torch.arange(20_000), stream=0, count=2)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = torch.histc(drawn, bins=16, min=0, max=1)
    assert ((counts - 2500) ** 2 / 2500).sum() < 37.7  # chi-square, 15 degrees, p = 0.001
    assert abs(torch.corrcoef(drawn.T)[0, 1]) < 0.025
