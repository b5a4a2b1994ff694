"""Scaling of the learning rate with the global batch."""

import sys
from types import FrameType

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

from paceline.optim.options import OptimOptions
from paceline.optim.rate import RateControl, scaled_lr
from paceline.optim.schedule import Schedule


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


CONSTANT = Schedule(kind="constant", total_steps=100, steps_per_epoch=10)
COSINE = Schedule(kind="cosine", total_steps=100, steps_per_epoch=10)


def _two_groups() -> SGD:
    weight, bias = torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))
    return SGD([{"params": [weight], "lr": 0.1}, {"params": [bias], "lr": 0.02}], lr=1.0)


def _rates(optimizer: SGD | Adam) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


def test_every_group_follows_as_with_torchs_scheduler() -> None:
    ours, torchs = _two_groups(), _two_groups()
    control = RateControl(ours, _rates(ours), COSINE)
    scheduler = CosineAnnealingLR(torchs, T_max=100)
    for step in range(100):
        control.apply(step)
        assert _rates(ours) == pytest.approx(_rates(torchs), rel=1e-12)
        assert control.lr_at(step) == _rates(ours)[0]
        torchs.step()
        scheduler.step()


def test_an_unchanged_factor_leaves_the_groups_alone() -> None:
    optimizer = _two_groups()
    control = RateControl(optimizer, [0.1, 0.02], CONSTANT)
    control.apply(0)
    optimizer.param_groups[0]["lr"] = 5.0
    control.apply(1)
    assert _rates(optimizer) == [5.0, 0.02]


def test_the_first_apply_sets_the_rates_of_a_restored_optimizer() -> None:
    optimizer = _two_groups()
    control = RateControl(optimizer, _rates(optimizer), COSINE)
    optimizer.param_groups[0]["lr"] = 123.0
    control.apply(0)
    assert _rates(optimizer) == [0.1, 0.02]


def test_a_replaced_schedule_is_used_from_the_next_step() -> None:
    optimizer = _two_groups()
    control = RateControl(optimizer, _rates(optimizer), COSINE)
    control.apply(20)
    control.schedule = COSINE.with_total_steps(40)
    control.apply(20)
    assert _rates(optimizer) == pytest.approx([0.05, 0.01])


def test_a_rate_held_in_a_tensor_is_changed_in_place() -> None:
    rate = torch.tensor(0.1)
    optimizer = Adam([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    RateControl(optimizer, [0.1], COSINE).apply(50)
    assert optimizer.param_groups[0]["lr"] is rate
    assert float(rate) == pytest.approx(0.05)


def test_one_base_rate_per_group() -> None:
    with pytest.raises(ValueError, match="1 base rates for 2 parameter groups"):
        RateControl(_two_groups(), [0.1], CONSTANT)


def _opcodes(control: RateControl, step: int) -> int:
    """Count the Python opcodes of one `apply`; the same on any machine."""
    seen = 0

    def trace(frame: FrameType, event: str, argument: object) -> object:
        nonlocal seen
        frame.f_trace_opcodes = True
        seen += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)  # type: ignore[arg-type]
    try:
        control.apply(step)
    finally:
        sys.settrace(before)
    return seen


@pytest.mark.parametrize(("schedule", "most"), [(CONSTANT, 45), (COSINE, 200)])
def test_cost_of_a_step(schedule: Schedule, most: int) -> None:
    optimizer = _two_groups()
    control = RateControl(optimizer, _rates(optimizer), schedule)
    control.apply(4)
    assert 0 < _opcodes(control, 5) <= most
