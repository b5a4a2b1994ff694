"""The schedule's rates reach every parameter group."""

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

from paceline.optim.schedule import Schedule
from paceline.training.hooks.learning_rate import LearningRateSchedule

CONSTANT = Schedule(kind="constant", total_steps=100, steps_per_epoch=10)
COSINE = Schedule(kind="cosine", total_steps=100, steps_per_epoch=10)


def _two_groups() -> SGD:
    weight, bias = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    return SGD([{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": 0.02}], lr=1.0)


def _rates(optimizer: SGD | Adam) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_every_group_follows_as_with_torchs_scheduler() -> None:
    ours, torchs = _two_groups(), _two_groups()
    control = LearningRateSchedule(ours, _rates(ours), COSINE)
    scheduler = CosineAnnealingLR(torchs, T_max=100)
    for step in range(100):
        control.begin_step(step, None)
        assert _rates(ours) == pytest.approx(_rates(torchs), rel=1e-12)
        assert control.lr_at(step) == _rates(ours)[0]
        torchs.step()
        scheduler.step()


def test_an_unchanged_factor_leaves_the_groups_alone() -> None:
    optimizer = _two_groups()
    control = LearningRateSchedule(optimizer, [0.1, 0.02], CONSTANT)
    control.begin_step(0, None)
    optimizer.param_groups[0]["lr"] = 5.0
    control.begin_step(1, None)
    assert _rates(optimizer) == [5.0, 0.02]


def test_the_first_step_sets_the_rates_of_a_restored_optimizer() -> None:
    optimizer = _two_groups()
    control = LearningRateSchedule(optimizer, _rates(optimizer), COSINE)
    optimizer.param_groups[0]["lr"] = 123.0
    control.begin_step(0, None)
    assert _rates(optimizer) == [0.1, 0.02]


def test_a_replaced_schedule_is_used_from_the_next_step() -> None:
    optimizer = _two_groups()
    control = LearningRateSchedule(optimizer, _rates(optimizer), COSINE)
    control.begin_step(20, None)
    control.schedule = COSINE.with_total_steps(40)
    control.begin_step(20, None)
    assert _rates(optimizer) == pytest.approx([0.05, 0.01])


def test_a_rate_held_in_a_tensor_is_changed_in_place() -> None:
    rate = torch.tensor(0.1)
    optimizer = Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    LearningRateSchedule(optimizer, [0.1], COSINE).begin_step(50, None)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.05)


def test_one_base_rate_per_group() -> None:
    with pytest.raises(ValueError, match="1 base rates for 2 parameter groups"):
        LearningRateSchedule(_two_groups(), [0.1], CONSTANT)
