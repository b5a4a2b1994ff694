"""What auto makes of measured steps."""

import re

import pytest

from paceline.errors import SnapshotError
from paceline.gradient_sync.cost_model import Compute, Machine, step_cost
from paceline.gradient_sync.options import SyncOptions
from paceline.results.profile import Arrival, EpochCosts, Spread, StepParts, StepProfile, WorkerTime
from paceline.training.sync import auto_policy
from paceline.training.sync.auto_policy import (
    Choice,
    first_choice,
    fitted_cluster,
)

COMPUTE_S = 0.1
BYTES = 100_000_000


def profile(
    exposed_s: float, workers: int = 8, device: str = "cpu", size: int = BYTES
) -> StepProfile:
    """A step of 0.1 s and what is exposed; 100 MB of gradients, four of them."""
    parts = StepParts(
        data=0.01,
        forward=0.03,
        backward=0.05,
        exposed=exposed_s,
        waiting=0.0,
        optimizer=0.01,
        other=0.0,
    )
    step_s = COMPUTE_S + exposed_s
    return StepProfile(
        world_size=workers,
        nodes=workers,
        sync="allreduce",
        device=device,
        global_batch=64,
        steps_per_epoch=100,
        steps_seen=8,
        step_s=Spread(median=step_s, low=step_s, high=step_s),
        images_per_s=64 / step_s,
        parts=parts,
        workers=tuple(
            WorkerTime(rank=rank, host="a", compute_s=COMPUTE_S, spread_s=0.0)
            for rank in range(workers)
        ),
        gradients=tuple(Arrival(at_s=0.01 * i, bytes=size // 4) for i in range(1, 5)),
        gradient_bytes=size,
        parameter_bytes=size,
        wire_bytes_per_step=0.0,
        epoch=EpochCosts(),
    )


def final_choice(
    measured: StepProfile,
    half_s: float,
    *,
    powersgd_rank: int | None = 4,
    may_be_local: bool = True,
) -> Choice:
    """Choose where small messages take 0.1 ms."""
    return auto_policy.final_choice(
        measured,
        measured.step_s.median,
        half_s,
        1e-4,
        powersgd_rank=powersgd_rank,
        may_be_local=may_be_local,
    )


def predicted_s(measured: StepProfile, method: SyncOptions) -> float:
    """What the cost model says of a step."""
    compute, cluster = Compute.of(measured), fitted_cluster(measured, 1e-4)
    return step_cost(compute, method, cluster, Machine.usual(measured.device)).step_s


def test_little_communication_changes_nothing() -> None:
    choice = first_choice(profile(0.009))
    assert choice is not None
    assert choice.method == "allreduce"
    assert "8.3 % of a step" in choice.why
    assert not choice.sends_half


def test_much_communication_is_worth_a_try() -> None:
    assert first_choice(profile(0.02)) is None


def test_without_a_measurement_nothing_changes() -> None:
    choice = first_choice(None)
    assert choice is not None
    assert (choice.method, choice.why) == ("allreduce", "no step could be measured")


@pytest.mark.parametrize("exposed_s", [0.02, 0.3, 3.0])
@pytest.mark.parametrize("workers", [2, 8])
def test_the_network_is_the_one_that_explains_the_wait(exposed_s: float, workers: int) -> None:
    measured = profile(exposed_s, workers)
    cluster = fitted_cluster(measured, 1e-4)
    assert cluster.workers == workers
    cost = step_cost(Compute.of(measured), SyncOptions(sync="allreduce"), cluster)
    assert cost.exposed_s == pytest.approx(exposed_s, rel=0.01)


def test_half_the_bytes_where_that_is_enough() -> None:
    choice = final_choice(profile(0.02, device="cuda"), 0.105)
    assert choice.method == "bf16"
    assert choice.sends_half
    assert "17 % of a step of 120 ms" in choice.why
    assert "4.8 % of 105 ms" in choice.why


@pytest.mark.parametrize(("half_s", "half_first"), [(0.25, True), (0.41, False)])
def test_powersgd_where_most_of_the_time_should_be_computation(
    half_s: float, half_first: bool
) -> None:
    choice = final_choice(profile(0.3, device="cuda", size=BYTES // 5), half_s, powersgd_rank=2)
    assert choice.method == "powersgd"
    assert choice.sends_half == half_first
    assert choice.options == SyncOptions(sync="powersgd", powersgd_rank=2)
    assert "75 % of a step of 400 ms" in choice.why
    assert re.search(r"; with PowerSGD of rank 2, 9\d % of the time should be comp", choice.why)
    assert "local" not in choice.why


def test_powersgd_goes_before_local_steps_that_would_be_faster() -> None:
    measured = profile(0.3, device="cuda", size=BYTES // 5)
    local = SyncOptions(sync="local", sync_every=64)
    assert predicted_s(measured, local) < predicted_s(measured, SyncOptions(sync="powersgd"))
    assert final_choice(measured, 0.25).method == "powersgd"


def test_local_steps_where_powersgd_computes_for_too_long() -> None:
    choice = final_choice(profile(0.3), 0.25)
    assert choice.method == "local"
    assert choice.every >= 2
    assert choice.delay == choice.every // 2
    assert choice.half_first
    assert choice.options == SyncOptions(
        sync="local", sync_every=choice.every, sync_delay=choice.delay
    )
    assert "with PowerSGD of rank 4" in choice.why
    assert f"; with averages of weights every {choice.every} steps, 9" in choice.why
    slower = final_choice(profile(3.0), 1.6)
    assert slower.every > choice.every


def test_local_steps_have_to_gain_against_powersgd(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of PowerSGD that misses the target by little, less than a twentieth is to be gained."""
    monkeypatch.setattr(auto_policy, "POWERSGD_TARGET", 0.999)
    measured = profile(0.3, device="cuda", size=BYTES // 5)
    choice = final_choice(measured, 0.25, powersgd_rank=1)
    assert choice.method == "powersgd"
    assert COMPUTE_S / predicted_s(measured, choice.options) < 0.999
    assert choice.why.endswith("of the time should be computation; local steps wouldn't be faster")


def test_powersgd_below_the_target_where_other_options_forbid_local_steps() -> None:
    measured = profile(3.0)
    choice = final_choice(measured, 1.6, may_be_local=False)
    assert choice.method == "powersgd"
    assert choice.half_first
    assert COMPUTE_S / predicted_s(measured, choice.options) < auto_policy.POWERSGD_TARGET
    assert choice.why.endswith("; local steps don't go with the other options")
    assert final_choice(measured, 1.6).method == "local"


def test_half_precision_where_powersgd_saves_too_little() -> None:
    choice = final_choice(profile(0.3), 0.13, may_be_local=False)
    assert choice.method == "bf16"
    assert "computation, which saves too little; local steps don't go with the other" in choice.why
    assert predicted_s(profile(0.3), SyncOptions(sync="powersgd")) > 0.13


def test_what_other_options_forbid_is_left_out() -> None:
    measured = profile(0.3, device="cuda", size=BYTES // 5)
    local = final_choice(measured, 0.25, powersgd_rank=None)
    assert local.method == "local"
    assert "PowerSGD" not in local.why
    half = final_choice(measured, 0.25, powersgd_rank=None, may_be_local=False)
    assert half.method == "bf16"
    plain = final_choice(measured, 0.41, powersgd_rank=None, may_be_local=False)
    assert plain.method == "allreduce"
    assert not plain.sends_half


def test_half_precision_that_gains_nothing_is_left_out() -> None:
    choice = final_choice(profile(0.3), 0.41)
    assert choice.method == "local"
    assert not choice.sends_half


def test_a_choice_passes_through_a_snapshot() -> None:
    choice = final_choice(profile(0.3), 0.25)
    assert Choice.from_json(choice.to_json()) == choice
    with pytest.raises(SnapshotError, match="no choice of --sync auto"):
        Choice.from_json('{"method": "local", "other": 1}')
