"""What auto makes of measured steps."""

import pytest

from paceline.config.profile import Arrival, EpochCosts, Spread, StepParts, StepProfile, WorkerTime
from paceline.errors import SnapshotError
from paceline.sync.cost import Compute, step_cost
from paceline.sync.options import SyncOptions
from paceline.trainer.autochoice import (
    Choice,
    final_choice,
    first_choice,
    fitted_cluster,
)

COMPUTE_S = 0.1
BYTES = 100_000_000


def profile(exposed_s: float, workers: int = 8) -> StepProfile:
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
        device="cpu",
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
        gradients=tuple(Arrival(at_s=0.01 * i, bytes=BYTES // 4) for i in range(1, 5)),
        gradient_bytes=BYTES,
        parameter_bytes=BYTES,
        wire_bytes_per_step=0.0,
        epoch=EpochCosts(),
    )


def test_little_communication_changes_nothing() -> None:
    choice = first_choice(profile(0.009))
    assert choice is not None
    assert choice.method == "allreduce"
    assert "8% of a step" in choice.why
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
    choice = final_choice(profile(0.02), 0.12, 0.105, 1e-4)
    assert choice.method == "bf16"
    assert choice.sends_half
    assert "17% of a step of 120 ms" in choice.why
    assert "5% of 105 ms" in choice.why


def test_local_steps_on_a_slow_network() -> None:
    choice = final_choice(profile(0.3), 0.4, 0.25, 1e-4)
    assert choice.method == "local"
    assert choice.every >= 2
    assert choice.delay == choice.every // 2
    assert choice.half_first
    assert choice.options == SyncOptions(
        sync="local", sync_every=choice.every, sync_delay=choice.delay
    )
    slower = final_choice(profile(3.0), 3.1, 1.6, 1e-4)
    assert slower.every > choice.every


def test_local_steps_that_other_options_forbid() -> None:
    choice = final_choice(profile(0.3), 0.4, 0.25, 1e-4, may_be_local=False)
    assert choice.method == "bf16"
    assert "local steps don't go with the other options" in choice.why


def test_half_precision_that_gains_nothing_is_left_out() -> None:
    choice = final_choice(profile(0.3), 0.4, 0.41, 1e-4)
    assert choice.method == "local"
    assert not choice.sends_half


def test_a_choice_passes_through_a_snapshot() -> None:
    choice = final_choice(profile(0.3), 0.4, 0.25, 1e-4)
    assert Choice.from_json(choice.to_json()) == choice
    with pytest.raises(SnapshotError, match="no choice of --sync auto"):
        Choice.from_json('{"method": "local", "other": 1}')
