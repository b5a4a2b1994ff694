"""The rate scales with the batch; schedules equal compositions of torch.optim.lr_scheduler."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

from paceline.errors import UsageError
from paceline.optim.options import OptimOptions
from paceline.optim.schedule import Schedule, build_schedule, scaled_lr

TOTAL = 60
PER_EPOCH = 6


def _by_torch(make: Callable[[SGD], LRScheduler | ChainedScheduler], steps: int) -> list[float]:
    """Run torch's scheduler for some steps at a base rate of 1."""
    optimizer = SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = make(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return rates


def _warm(optimizer: SGD, steps: int, start: float = 0.25) -> LinearLR:
    return LinearLR(optimizer, start_factor=start, total_iters=steps)


def _schedule(total: int = TOTAL, **given: object) -> Schedule:
    options = OptimOptions(**given)  # type: ignore[arg-type]
    return build_schedule(options, total_steps=total, steps_per_epoch=PER_EPOCH)


def _factors(schedule: Schedule, steps: int | None = None) -> list[float]:
    return [schedule.factor(step) for step in range(steps or schedule.total_steps)]


def _same(ours: list[float], torchs: list[float]) -> None:
    assert ours == pytest.approx(torchs, rel=1e-12, abs=1e-15)


def test_constant_is_one() -> None:
    assert set(_factors(_schedule())) == {1.0}


def test_warm_up_alone() -> None:
    ours = _schedule(warmup_epochs=1.5, warmup_start=0.25)
    assert ours.warmup_steps == 9
    _same(_factors(ours), _by_torch(lambda o: _warm(o, 9), TOTAL))


def test_warm_up_starts_at_zero_unless_said() -> None:
    ours = _schedule(warmup_steps=4)
    assert _factors(ours, 6) == [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine() -> None:
    torchs = _by_torch(lambda o: CosineAnnealingLR(o, T_max=TOTAL), TOTAL)
    _same(_factors(_schedule(schedule="cosine")), torchs)


def test_cosine_to_a_final_factor() -> None:
    torchs = _by_torch(lambda o: CosineAnnealingLR(o, T_max=TOTAL, eta_min=0.05), TOTAL)
    _same(_factors(_schedule(schedule="cosine", final_lr_factor=0.05)), torchs)


def test_warm_up_then_cosine() -> None:
    def make(optimizer: SGD) -> LRScheduler:
        after = CosineAnnealingLR(optimizer, T_max=TOTAL - 10)
        return SequentialLR(optimizer, [_warm(optimizer, 10), after], milestones=[10])

    ours = _schedule(schedule="cosine", warmup_steps=10, warmup_start=0.25)
    _same(_factors(ours), _by_torch(make, TOTAL))


def test_step_by_epoch() -> None:
    ours = _schedule(schedule="step", step_epochs=3, step_factor=0.5)
    torchs = _by_torch(lambda o: StepLR(o, step_size=3 * PER_EPOCH, gamma=0.5), TOTAL)
    _same(_factors(ours), torchs)


def test_step_is_a_tenth_every_thirty_epochs() -> None:
    ours = _schedule(total=90 * PER_EPOCH, schedule="step")
    by_hand = [0.1 ** ((step // PER_EPOCH) // 30) for step in range(90 * PER_EPOCH)]
    assert _factors(ours) == by_hand


@pytest.mark.parametrize("warmup_steps", [10, 30])
def test_warm_up_and_step_counting_epochs_from_the_start(warmup_steps: int) -> None:
    def make(optimizer: SGD) -> ChainedScheduler:
        drops = StepLR(optimizer, step_size=4 * PER_EPOCH, gamma=0.1)
        return ChainedScheduler([_warm(optimizer, warmup_steps), drops])

    ours = _schedule(schedule="step", step_epochs=4, warmup_steps=warmup_steps, warmup_start=0.25)
    _same(_factors(ours), _by_torch(make, TOTAL))


def test_step_starting_where_the_warm_up_ends() -> None:
    """With a warm-up of `step_epochs`, SequentialLR's later start shows as one drop fewer."""

    def make(optimizer: SGD) -> LRScheduler:
        drops = StepLR(optimizer, step_size=2 * PER_EPOCH, gamma=0.1)
        return SequentialLR(optimizer, [_warm(optimizer, 12), drops], milestones=[12])

    ours = _schedule(schedule="step", step_epochs=2, warmup_epochs=2, warmup_start=0.25)
    torchs = _by_torch(make, TOTAL)
    _same(_factors(ours)[12:], [rate * 0.1 for rate in torchs[12:]])
    _same(_factors(ours)[:12], torchs[:12])


@pytest.mark.parametrize("total", [2, 3, 4, 10, TOTAL, 997])
def test_one_cycle(total: int) -> None:
    def make(optimizer: SGD) -> LRScheduler:
        return OneCycleLR(optimizer, max_lr=1.0, total_steps=total, cycle_momentum=False)

    ours = _schedule(total=total, schedule="one-cycle")
    _same(_factors(ours), _by_torch(make, total))


@given(
    total=st.integers(1, 500),
    warmup=st.integers(0, 500),
    start=st.floats(0.0, 1.0),
    step=st.integers(0, 2000),
    kind=st.sampled_from(["constant", "step", "cosine", "one-cycle"]),
)
def test_a_factor_is_never_negative_nor_above_one(
    total: int, warmup: int, start: float, step: int, kind: str
) -> None:
    schedule = Schedule(
        kind=kind,  # type: ignore[arg-type]
        total_steps=total,
        steps_per_epoch=7,
        warmup_steps=0 if kind == "one-cycle" else warmup,
        warmup_start=start,
        step_epochs=5,
    )
    assert 0.0 <= schedule.factor(step) <= 1.0


@pytest.mark.parametrize("kind", ["cosine", "one-cycle"])
def test_the_last_value_stays_after_the_end(kind: str) -> None:
    schedule = _schedule(schedule=kind)
    assert schedule.factor(TOTAL) == schedule.factor(10 * TOTAL) < 1e-5


@pytest.mark.parametrize("kind", ["cosine", "one-cycle"])
def test_another_length_is_as_if_planned_so(kind: str) -> None:
    refitted = _schedule(schedule=kind).with_total_steps(40)
    assert _factors(refitted) == _factors(_schedule(total=40, schedule=kind))


def test_another_length_keeps_the_warm_up_even_when_shorter() -> None:
    refitted = _schedule(schedule="cosine", warmup_steps=20).with_total_steps(5)
    assert _factors(refitted) == [step / 20 for step in range(5)]
    assert refitted.with_total_steps(0).total_steps == 1


def test_a_warm_up_longer_than_the_training_is_refused() -> None:
    with pytest.raises(UsageError, match="warm-up of 30 steps is longer than the training of 12"):
        _schedule(total=12, warmup_epochs=5)


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
