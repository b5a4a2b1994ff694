from pathlib import Path

import pytest
import torch

from benchmarks.counting import count_opcodes, count_operators


@pytest.fixture(autouse=True)
def inductor_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's first dispatch mode sets this variable; here it is put back."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))


def busy(rounds: int) -> int:
    total = 0
    for number in range(rounds):
        total += number
    return total


def test_opcodes_are_counted_by_function_and_repeat() -> None:
    short = count_opcodes(lambda: void(busy(10)), ())
    assert short == count_opcodes(lambda: void(busy(10)), ())
    name = "tests.benchmarks.test_counting.busy"
    assert count_opcodes(lambda: void(busy(20)), ())[name] > short[name] > 0


def test_files_can_be_left_out() -> None:
    assert not count_opcodes(lambda: void(busy(10)), (Path(__file__),))


def test_operators_of_the_backward_pass_are_counted() -> None:
    weight = torch.ones(3, requires_grad=True)
    found = count_operators(lambda: (weight * 2).sum().backward())
    assert found.operators["aten.mul"] == 2  # one forward, one backward
    assert not found.syncs


def test_fetches_are_counted() -> None:
    values = torch.ones(3)
    found = count_operators(lambda: void((values.tolist(), values.sum().item(), bool(values[0]))))
    assert found.syncs == {"Tensor.tolist": 1, "aten._local_scalar_dense": 2}


def void(value: object) -> None:
    """Drop a value."""
