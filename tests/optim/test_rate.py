"""Scaling of the learning rate with the global batch."""

import pytest

from paceline.optim.options import OptimOptions
from paceline.optim.rate import scaled_lr


def test_unscaled() -> None:
    assert scaled_lr(OptimOptions(lr=0.1), 4096) == (0.1, "lr 0.1 (not scaled with the batch)")


def test_linear() -> None:
    options = OptimOptions(lr=0.1, lr_scaling="linear", base_batch=64)
    lr, text = scaled_lr(options, 256)
    assert lr == pytest.approx(0.4, rel=1e-15)
    assert text == "lr 0.4 = 0.1 x 256/64 (linear, base batch 64)"


def test_square_root() -> None:
    options = OptimOptions(lr=0.1, lr_scaling="sqrt", base_batch=64)
    lr, text = scaled_lr(options, 256)
    assert lr == pytest.approx(0.2, rel=1e-15)
    assert text == "lr 0.2 = 0.1 x sqrt(256/64) (sqrt, base batch 64)"


@pytest.mark.parametrize(
    ("global_batch", "expected"), [(32, 1.00e-4), (64, 1.41e-4), (128, 2.00e-4), (256, 2.83e-4)]
)
def test_square_root_gives_the_rates_of_a_published_study(
    global_batch: int, expected: float
) -> None:
    """VGG-19 on 1, 2, 4 and 8 nodes at batch 32 each."""
    options = OptimOptions(lr=1e-4, lr_scaling="sqrt", base_batch=32)
    assert scaled_lr(options, global_batch)[0] == pytest.approx(expected, abs=0.5e-6)


def test_a_smaller_batch_lowers_the_rate() -> None:
    options = OptimOptions(lr=0.1, lr_scaling="linear", base_batch=256)
    assert scaled_lr(options, 64)[0] == pytest.approx(0.025, rel=1e-15)
