"""The yardstick moves tensors by as much as rounding, and by no more."""

import pytest
import torch

from paceline.verify.observing.perturbation import disturb_gradients, disturb_weights


def test_weights_move_by_their_last_bit() -> None:
    weights = torch.randn(70, 1000)
    moved = weights.clone()
    disturb_weights([moved], 3)
    assert float((moved - weights).norm() / weights.norm()) == pytest.approx(1.2e-7, rel=0.3)
    assert not torch.equal(moved, weights)


@pytest.mark.parametrize(("autocast", "size"), [(None, 9.5e-7), (torch.bfloat16, 2e-3)])
def test_gradients_move_by_some_bits(autocast: torch.dtype | None, size: float) -> None:
    parameter = torch.nn.Parameter(torch.zeros(50, 40))
    parameter.grad = torch.randn(50, 40)
    before = parameter.grad.clone()
    disturb_gradients([parameter, torch.nn.Parameter(torch.zeros(1))], 1, autocast)
    apart = float((parameter.grad - before).norm() / before.norm())
    assert apart == pytest.approx(size, rel=0.3)


def test_what_is_exactly_zero_stays() -> None:
    """A sum of zeros comes out alike in any order; Adam would make a whole step of the noise."""
    parameter = torch.nn.Parameter(torch.zeros(50, 40))
    parameter.grad = torch.randn(50, 40)
    parameter.grad[7] = 0
    disturb_gradients([parameter], 1, None)
    assert not parameter.grad[7].any()


def test_steps_are_disturbed_in_other_ways() -> None:
    one, two = torch.ones(100), torch.ones(100)
    disturb_weights([one], 1)
    disturb_weights([two], 2)
    assert not torch.equal(one, two)
