"""Which network explains a study: one that was made up is found again; the EC2 study's."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest

from paceline.errors import UsageError
from paceline.gradient_sync.cost_model import Compute, Machine, step_cost
from paceline.gradient_sync.network_model import Cluster, Network
from paceline.gradient_sync.options import SyncOptions
from paceline.scaling.fitting import Fitted, SizeTime, fit_link, lowest
from tests.docs.pages import ROOT
from tests.scaling.vgg import EPOCHS_S, STEP_S, STEPS, profile_of

VGG = Compute.of(profile_of())
UNKNOWN = Cluster(nodes=1, network=Network(bandwidth_bytes_per_s=1.0, round_trip_s=5e-5))
WHOLE, SMALL, SMALLEST = (4096, 4096, 20), (512, 20), (20,)


def made(rate: float, nodes: int, share: float = 1.0) -> SizeTime:
    network = Network(bandwidth_bytes_per_s=rate, round_trip_s=5e-5)
    cost = step_cost(VGG.scaled(share), SyncOptions(), Cluster(nodes=nodes, network=network))
    return SizeTime(nodes=nodes, step_s=cost.step_s, share=share)


@pytest.mark.parametrize("rate", [1e7, 8e8, 1e10])
def test_a_link_is_found_again(rate: float) -> None:
    fitted = fit_link(VGG, [made(rate, nodes) for nodes in (2, 4, 8)], UNKNOWN)
    assert fitted.network.bandwidth_bytes_per_s == pytest.approx(rate, rel=1e-3)
    assert fitted.by_size == pytest.approx([rate] * 3, rel=1e-3)
    assert fitted.relative_error < 1e-4


def test_with_strong_scaling_each_size_has_a_share_of_the_computation() -> None:
    fitted = fit_link(VGG, [made(8e8, nodes, 1 / nodes) for nodes in (2, 4, 8)], UNKNOWN)
    assert fitted.network.bandwidth_bytes_per_s == pytest.approx(8e8, rel=1e-3)


def test_a_size_that_no_link_explains() -> None:
    """It was faster than one worker alone."""
    fitted = fit_link(VGG, [made(8e8, 2), SizeTime(nodes=4, step_s=STEP_S / 2)], UNKNOWN)
    assert fitted.by_size[0] == pytest.approx(8e8, rel=1e-3)
    assert fitted.by_size[1] is None


def test_one_host_says_nothing_about_a_network() -> None:
    with pytest.raises(UsageError, match="say --link and --rtt"):
        fit_link(VGG, [SizeTime(nodes=1, per_node=4, step_s=1.0)], UNKNOWN)


def gbits(fitted: Fitted) -> float:
    return fitted.network.bandwidth_bytes_per_s * 8e-9


@pytest.mark.parametrize(
    ("head", "by_size", "one", "relative_error"),
    [
        (WHOLE, [6.15, 6.97, 5.35], 6.19, 0.087),
        (SMALL, [1.45, 1.64, 1.26], 1.46, 0.087),
        (SMALLEST, [1.00, 1.04, 0.79], 0.92, 0.089),
    ],
)
def test_the_link_that_explains_the_ec2_study(
    head: Sequence[int], by_size: Sequence[float], one: float, relative_error: float
) -> None:
    """The figures of docs/internals/prediction.md."""
    compute = Compute.of(profile_of(head=head))
    measured = [SizeTime(nodes=n, step_s=EPOCHS_S[n] / STEPS[n]) for n in (2, 4, 8)]
    fitted = fit_link(compute, measured, UNKNOWN)
    found = [None if rate is None else rate * 8e-9 for rate in fitted.by_size]
    assert found == pytest.approx(by_size, abs=0.006)
    assert gbits(fitted) == pytest.approx(one, abs=0.006)
    assert fitted.relative_error == pytest.approx(relative_error, abs=0.001)


@pytest.mark.parametrize(
    ("head", "rate", "fixed_s", "relative_error"),
    [(WHOLE, 16.8, 87, 0.023), (SMALL, 2.96, 72, 0.007), (SMALLEST, 3.08, 76, 0.009)],
)
def test_a_fixed_cost_explains_it_as_well(
    head: Sequence[int], rate: float, fixed_s: float, relative_error: float
) -> None:
    """Better even: two numbers fit four epochs. Which one it was can't be told from them."""

    def network_for(seconds: float) -> Fitted:
        compute = Compute.of(profile_of((EPOCHS_S[1] - seconds) / STEPS[1], head))

        def apart(log_per_s: float) -> float:
            network = replace(UNKNOWN.network, bandwidth_bytes_per_s=math.exp(log_per_s))
            pairs = []
            for nodes, epoch_s in EPOCHS_S.items():
                there = replace(UNKNOWN, network=network, nodes=nodes)
                step_s = step_cost(compute, SyncOptions(), there, Machine()).step_s
                pairs.append((STEPS[nodes] * step_s + seconds) / epoch_s - 1)
            return math.sqrt(fmean(error**2 for error in pairs))

        best = lowest(apart, math.log(1e4), math.log(1e13))
        network = replace(UNKNOWN.network, bandwidth_bytes_per_s=math.exp(best))
        return Fitted(network=network, relative_error=apart(best), by_size=())

    most_s = 0.999 * min(EPOCHS_S.values())
    best_s = lowest(lambda seconds: network_for(seconds).relative_error, 0.0, most_s)
    fitted = network_for(best_s)
    assert gbits(fitted) == pytest.approx(rate, rel=0.01)
    assert best_s == pytest.approx(fixed_s, abs=0.5)
    assert fitted.relative_error == pytest.approx(relative_error, abs=0.001)


def test_the_page_has_the_studys_figures_and_what_follows_from_them() -> None:
    """The table of prediction.md: N nodes are efficient as one's time over N times theirs."""
    text = (ROOT / "docs" / "internals" / "prediction.md").read_text()
    rows = {name: figures_of(text, name) for name in ("steps of an epoch", "epoch, minutes")}
    nodes = [1, 2, 4, 8]
    assert dict(zip(nodes, rows["steps of an epoch"], strict=True)) == STEPS
    minutes = dict(zip(nodes, rows["epoch, minutes"], strict=True))
    assert {n: 60 * of for n, of in minutes.items()} == pytest.approx(EPOCHS_S)
    efficiency = [minutes[1] / (n * minutes[n]) for n in nodes]
    # The study's own, which it cut rather than rounded.
    assert figures_of(text, "efficiency") == pytest.approx(efficiency, abs=0.01)
    with_375 = STEP_S / (EPOCHS_S[2] / 375)
    assert f"with 375 it would be\n{with_375:.2f} a step" in text


def figures_of(text: str, name: str) -> list[float]:
    (line,) = re.findall(rf"^\| {name} \|(.*)\|$", text, re.MULTILINE)
    return [float(cell) for cell in line.split("|")]
