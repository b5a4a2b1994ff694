"""Non-persistent buffers whose values change while training are found."""

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.gradient_sync.unsaved_buffers import UnsavedBuffers


class Layer(nn.Module):
    table: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(4.0), persistent=False)
        self.register_buffer("seen", torch.zeros(4))


def watched() -> tuple[Layer, UnsavedBuffers]:
    model = nn.Sequential(nn.Linear(2, 2), Layer())
    layer = model[1]
    assert isinstance(layer, Layer)
    return layer, UnsavedBuffers({"model": model})


def test_what_is_in_the_snapshots_may_change() -> None:
    layer, hidden = watched()
    layer.seen += 1
    hidden.check()


def test_a_value_that_changes_is_named() -> None:
    layer, hidden = watched()
    hidden.check()
    layer.table[2] += 1
    with pytest.raises(JobError, match=r"the buffer 1\.table changes .* persistent=False"):
        hidden.check()


def test_another_tensor_of_other_values_is_named() -> None:
    layer, hidden = watched()
    layer.table = torch.ones(4)
    with pytest.raises(JobError, match=r"1\.table"):
        hidden.check()


def test_the_same_values_written_again_are_no_change() -> None:
    layer, hidden = watched()
    layer.table.copy_(torch.arange(4.0))
    hidden.check()
    layer.table = layer.table.clone()
    hidden.check()


def test_a_cache_may_grow_but_then_stays() -> None:
    layer, hidden = watched()
    layer.table = torch.arange(8.0)
    hidden.check()
    hidden.check()
    layer.table.mul_(2)
    with pytest.raises(JobError, match=r"1\.table"):
        hidden.check()


def test_a_cache_may_be_thrown_away() -> None:
    layer, hidden = watched()
    layer.table = None  # type: ignore[assignment]
    hidden.check()
    hidden.check()


def test_a_tensor_without_a_version() -> None:
    layer, hidden = watched()
    with torch.inference_mode():
        layer.table = torch.arange(4.0)
    hidden.check()
    with torch.inference_mode():
        layer.table += 1
    with pytest.raises(JobError, match=r"1\.table"):
        hidden.check()


def test_models_are_told_apart() -> None:
    one, two = Layer(), Layer()
    hidden = UnsavedBuffers({"one": one, "two": two})
    two.table += 1
    with pytest.raises(JobError, match=r"the buffer two\.table changes"):
        hidden.check()
