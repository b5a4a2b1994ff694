"""Predictions: limits, both kinds of scaling, failures, bands, epochs and money."""

from dataclasses import replace

import pytest

from paceline.errors import UsageError
from paceline.gradient_sync.cost_model import Machine
from paceline.gradient_sync.network_model import Network
from paceline.gradient_sync.options import SyncOptions
from paceline.results.profile import EpochCosts, Spread, StepProfile, WorkerTime
from paceline.scaling.prediction import (
    Assumptions,
    Predicted,
    cost_per_epoch,
    predict,
    predict_band,
)
from tests.scaling.vgg import STEP_S, cluster_of, profile_of

VGG = profile_of()
PLAIN, BF16 = SyncOptions(sync="allreduce"), SyncOptions(sync="allreduce", sync_precision="bf16")
STUDY = Network(bandwidth_bytes_per_s=5.35e9 / 8, round_trip_s=5e-5)
FREE = Assumptions(machine=Machine())


def at(nodes: int, method: SyncOptions = PLAIN, assumed: Assumptions = FREE) -> Predicted:
    return predict(VGG, method, cluster_of(VGG, nodes, STUDY, assumed=assumed), assumed)


def test_weak_scaling_keeps_each_workers_batch() -> None:
    two, eight = at(2), at(8)
    assert (two.global_batch, eight.global_batch) == (64, 256)
    assert two.images_per_s == pytest.approx(64 / two.step_s)
    assert eight.efficiency == pytest.approx(STEP_S / eight.step_s)
    assert eight.epoch_s == pytest.approx(82 * eight.step_s)


def test_strong_scaling_keeps_the_global_batch() -> None:
    strong = replace(FREE, mode="strong")
    eight = at(8, assumed=strong)
    assert eight.global_batch == 32
    assert eight.parts.compute_s == pytest.approx(STEP_S / 8)
    assert eight.efficiency == pytest.approx(STEP_S / 8 / eight.step_s)
    assert eight.efficiency < at(8).efficiency
    with pytest.raises(UsageError, match=r"64 workers can't share a global batch of 32.*weak"):
        at(64, assumed=strong)


def test_a_profile_of_two_workers_predicts_what_that_of_one_does() -> None:
    two: StepProfile = replace(
        VGG,
        world_size=2,
        nodes=2,
        global_batch=64,
        steps_per_epoch=325,
        step_s=Spread(median=STEP_S + 0.5, low=STEP_S + 0.5, high=STEP_S + 0.5),
        parts=replace(VGG.parts, exposed=0.4, waiting=0.1),
        workers=(*VGG.workers, replace(VGG.workers[0], rank=1)),
    )
    told = predict(two, PLAIN, cluster_of(two, 8, STUDY), FREE)
    assert told.step_s == pytest.approx(at(8).step_s)
    assert told.efficiency == pytest.approx(at(8).efficiency)
    assert told.global_batch == at(8).global_batch
    assert told.epoch_s == pytest.approx(at(8).epoch_s or 0.0, rel=0.01)
    strong = replace(FREE, mode="strong")
    assert predict(two, PLAIN, cluster_of(two, 1, STUDY), strong).efficiency == pytest.approx(1.0)


def test_eight_workers_on_a_link_take_as_long_as_one_a_node_would() -> None:
    """A ring over all crosses every link once; what differs is 2 (n - 1) / n."""
    shared = predict(VGG, PLAIN, cluster_of(VGG, 2, STUDY, per_node=8), FREE)
    single = predict(VGG, PLAIN, cluster_of(VGG, 16, STUDY), FREE)
    assert shared.workers == single.workers == 16
    assert shared.step_s == pytest.approx(single.step_s, rel=0.01)
    slow_inside = replace(STUDY, bandwidth_bytes_per_s=1e8)
    slow = cluster_of(VGG, 2, STUDY, per_node=8, within=slow_inside)
    assert predict(VGG, PLAIN, slow, FREE).step_s > 2 * shared.step_s


def test_gpus_are_taken_to_use_nccl() -> None:
    """Trees keep the latency of a thousand nodes low, where a ring adds it up."""
    far = replace(STUDY, round_trip_s=1e-3, bandwidth_bytes_per_s=1e12)
    assert predict(VGG, PLAIN, cluster_of(VGG, 1024, far)).efficiency > 0.8
    on_processors = replace(VGG, device="cpu")
    assert predict(on_processors, PLAIN, cluster_of(on_processors, 1024, far)).efficiency < 0.2
    tree = replace(FREE, library="nccl")
    nccl = cluster_of(on_processors, 1024, far, assumed=tree)
    assert predict(on_processors, PLAIN, nccl, tree).efficiency > 0.8


def test_bands_never_promise_more_than_all() -> None:
    """Also where most of a step comes after the backward pass."""
    late = replace(VGG.parts, backward=VGG.parts.backward / 2, optimizer=VGG.parts.backward / 2)
    noisy = replace(
        VGG,
        parts=late,
        steps_seen=4,
        step_s=Spread(median=STEP_S, low=STEP_S / 2, high=STEP_S * 2),
    )
    fast = Network(bandwidth_bytes_per_s=1e14)
    band = predict_band(noisy, PLAIN, cluster_of(noisy, 2, fast), FREE)
    assert 0.97 < band.efficiency.low <= band.efficiency.high <= 1.0
    width = band.step_s.high / band.step_s.low
    assert width > 1.5


def test_fixed_costs_of_an_epoch() -> None:
    """Evaluation is shared among the workers; a snapshot and the loader's start aren't."""
    costs = EpochCosts(evaluation_s=80.0, snapshot_s=5.0, loader_start_s=1.0)
    told = predict(replace(VGG, epoch=costs), PLAIN, cluster_of(VGG, 8, STUDY), FREE)
    assert told.fixed_s == 80 / 8 + 6
    assert told.epoch_s == pytest.approx((at(8).epoch_s or 0.0) + 16)
    assert told.efficiency == at(8).efficiency


def test_epochs_of_unknown_length() -> None:
    unknown = predict(replace(VGG, steps_per_epoch=0), PLAIN, cluster_of(VGG, 8, STUDY))
    assert unknown.epoch_s is None
    assert cost_per_epoch(unknown, 1.0) is None


def test_money() -> None:
    told = at(8)
    assert cost_per_epoch(told, 0.5) == pytest.approx(8 * 0.5 * (told.epoch_s or 0.0) / 3600)


def played(nodes: int, mtbf_s: float, interval_s: float, restart_s: float) -> float:
    """Play failures: the share of the time that ends up in snapshots."""
    from random import Random

    random, time, kept = Random(5), 0.0, 0.0
    for _ in range(20_000):
        left = random.expovariate(nodes / mtbf_s)
        while left < interval_s:
            time += left
            left = random.expovariate(nodes / mtbf_s)
            while left < restart_s:  # it fails while it starts
                time += left
                left = random.expovariate(nodes / mtbf_s)
            time += restart_s
            left -= restart_s
        time += interval_s
        kept += interval_s
    return kept / time


@pytest.mark.parametrize("nodes", [1, 64, 1024])
def test_failures_cost_what_they_do_when_they_are_played(nodes: int) -> None:
    assumed = replace(FREE, mtbf_s=1000 * 3600.0, restart_s=120.0, snapshot_every_s=600.0)
    told = at(nodes, assumed=assumed)
    assert told.available == pytest.approx(played(nodes, 3.6e6, 600.0, 120.0), abs=0.01)
    assert told.efficiency == pytest.approx(at(nodes).efficiency * told.available)


def test_where_nothing_ever_gets_done() -> None:
    hopeless = replace(FREE, mtbf_s=60.0, snapshot_every_s=3600.0)
    assert at(1024, assumed=hopeless).available < 1e-6


def test_a_band_holds_its_prediction_and_is_the_same_each_time() -> None:
    band = predict_band(VGG, PLAIN, cluster_of(VGG, 8, STUDY), FREE)
    assert band.predicted == at(8)
    assert band.efficiency.low < at(8).efficiency < band.efficiency.high
    assert band.step_s.low < at(8).step_s < band.step_s.high
    assert band == predict_band(VGG, PLAIN, cluster_of(VGG, 8, STUDY), FREE)


def test_bands_are_wider_the_less_is_known() -> None:
    def width(profile: StepProfile, nodes: int, doubt: float = 0.1) -> float:
        assumed = replace(FREE, link_uncertainty=doubt, library="gloo")
        cluster = cluster_of(profile, nodes, STUDY, assumed=assumed)
        band = predict_band(profile, PLAIN, cluster, assumed).efficiency
        return (band.high - band.low) / band.low

    noisy = replace(
        VGG,
        steps_seen=1,
        step_s=Spread(median=STEP_S, low=STEP_S * 0.5, high=STEP_S * 1.5),
        workers=(WorkerTime(rank=0, host="a", compute_s=STEP_S, spread_s=0.3),),
    )
    assert width(VGG, 8) < width(VGG, 8, 0.5)
    assert width(VGG, 8) < width(VGG, 256)
    assert width(VGG, 8) < width(noisy, 8)


def test_the_figures_of_the_page() -> None:
    """prediction.md, "What explains the EC2 study", with a GPU's cost of compression."""
    ways = {
        "allreduce": PLAIN,
        "bf16": BF16,
        "powersgd": SyncOptions(sync="powersgd"),
    }
    found = [round(at(8, way, Assumptions()).efficiency, 2) for way in ways.values()]
    assert found == [0.47, 0.80, 0.97]


def test_a_fixed_cost_that_is_shared() -> None:
    """The same page's second explanation: 87.2 s an epoch, 16.78 Gbit/s."""
    step_s, fast = (8.76 * 60 - 87.2) / 650, Network(bandwidth_bytes_per_s=16.78e9 / 8)

    def whole(costs: EpochCosts, network: Network = fast) -> float:
        slow = replace(profile_of(step_s), epoch=costs)
        told = predict(slow, PLAIN, cluster_of(slow, 8, network), FREE)
        return 8.76 * 60 / 8 / (told.epoch_s or 1.0)

    endless = Network(bandwidth_bytes_per_s=1e15)
    found = [whole(EpochCosts(snapshot_s=87.2)), whole(EpochCosts(snapshot_s=87.2), endless)]
    assert found == pytest.approx([0.456, 0.461], abs=6e-4)
    assert whole(EpochCosts(evaluation_s=87.2)) == pytest.approx(0.97, abs=5e-3)
