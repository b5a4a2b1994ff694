"""Weights in one flat row: whatever their layout in memory, and wherever it is cut."""

import pytest
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.gradient_sync.local_sgd.layout import LocalLayout

CPU = torch.device("cpu")


def mixed() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(2, 3, 4, 5, generator=generator)
    return {
        "image": image.contiguous(memory_format=torch.channels_last),
        "turned": torch.randn(4, 3, generator=generator).t(),
        "scalar": torch.tensor(2.5),
        "half": torch.randn(7, generator=generator).to(torch.bfloat16),
        "complex": torch.randn(3, generator=generator, dtype=torch.complex64),
        "single": torch.randn(1, 4, generator=generator),
    }


@pytest.mark.parametrize("parts", [1, 2, 7, 200])
@pytest.mark.parametrize("multiple", [1, 16])
def test_parts_hold_all_weights_once(parts: int, multiple: int) -> None:
    weights = mixed()
    layout = LocalLayout(weights, parts, multiple)
    whole, pieces = layout.zeros(CPU), layout.zeros(CPU)
    layout.read(None, whole)
    for part in range(parts):
        layout.read(part, pieces)
        assert layout.is_empty(part) == (not whole[layout.slice_of(part)].numel()) or (
            part * layout.part_size >= layout.total
        )
    assert torch.equal(whole, pieces)
    assert layout.part_size % multiple == 0
    total = sum(p.numel() * (2 if p.is_complex() else 1) for p in weights.values())
    assert layout.total == total
    assert sorted(whole.tolist())[-5:] == sorted(whole[:total].tolist())[-5:]
    for name, view in layout.named(whole).items():
        real = torch.view_as_real(weights[name]) if name == "complex" else weights[name]
        assert torch.equal(view, real.float())


@pytest.mark.parametrize("parts", [1, 3])
def test_what_is_written_and_added_ends_where_it_belongs(parts: int) -> None:
    weights, expected = mixed(), mixed()
    layout = LocalLayout(weights, parts, 1)
    flat = layout.zeros(CPU)
    layout.read(None, flat)
    for part in range(parts):
        layout.write(part, flat * 2)
        layout.add(part, flat)
    for name, weight in weights.items():
        torch.testing.assert_close(weight, expected[name] * 3, rtol=1e-2, atol=1e-2)
        assert weight.stride() == expected[name].stride()


def test_doubles_make_the_row_a_double_one() -> None:
    layout = LocalLayout({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.float64)}, 1, 1)
    assert layout.zeros(CPU).dtype == torch.float64


def test_nothing_to_train() -> None:
    layout = LocalLayout({}, 2, 16)
    assert layout.size == 0
    assert layout.is_empty(0)
    layout.write(None, layout.zeros(CPU))


def test_gaps_are_refused() -> None:
    with pytest.raises(UsageError, match="gappy has gaps in memory"):
        LocalLayout({"gappy": torch.zeros(4, 4)[:, :2]}, 1, 1)
