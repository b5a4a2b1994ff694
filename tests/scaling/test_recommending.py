"""What is recommended, in situations of all kinds."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.gradient_sync.cost_model import Machine
from paceline.results.profile import EpochCosts, Spread, StepProfile, WorkerTime
from paceline.scaling.forecast import ForecastRequest, Projection, project
from paceline.scaling.options import PredictOptions
from paceline.scaling.prediction import Assumptions
from paceline.scaling.prediction_inputs import NetworkLink, stated_link
from paceline.scaling.recommending import recommend, recommended
from tests.scaling.vgg import STEP_S, profile_of

VGG = profile_of()
STUDY = "6.4gbit"
ALL, PLAIN = PredictOptions(), PredictOptions(methods="allreduce")


def link(speed: str, round_trip: str = "50us") -> NetworkLink:
    return stated_link(speed, round_trip, "nccl")


def projection(
    speed: str,
    nodes: Sequence[int] = (2, 4, 8),
    profile: StepProfile = VGG,
    methods: PredictOptions = ALL,
    round_trip: str = "50us",
    **more: object,
) -> Projection:
    assumed = more.pop("assumed", Assumptions(machine=Machine(memory_bytes_per_s=2e11)))
    assert isinstance(assumed, Assumptions)
    return project(
        ForecastRequest(
            profile=profile,
            link=link(speed, round_trip),
            nodes=tuple(nodes),
            methods=methods.chosen_methods(),
            assumed=replace(assumed, draws=2),
            **more,  # type: ignore[arg-type]
        )
    )


def told(of: Projection) -> str:
    return " ".join(recommend(of))


def test_everything_pays() -> None:
    found = projection("100gbit")
    assert told(found) == "All-reduce pays on all of these sizes: 8 nodes reach 1.00."
    assert recommended(found).method.sync == "allreduce"


def test_two_nodes_pay_eight_dont_and_rounded_gradients_do() -> None:
    found = projection(STUDY)
    assert recommend(found)[:2] == (
        "With all-reduce, 2 nodes pay (0.81), 4 don't (0.59).",
        "With allreduce bf16, 8 nodes pay (0.88): gradients are rounded to 8 bits of precision, "
        "which training rarely notices.",
    )
    assert recommended(found).method.sync_precision == "bf16"


def test_only_powersgd_pays() -> None:
    found = projection("100mbit")
    assert recommend(found)[1] == (
        "With powersgd rank 4, 8 nodes pay (0.86): gradients are approximated, so compare the "
        "accuracy."
    )


def test_nothing_pays() -> None:
    found = projection("5mbit")
    assert "No way of combining gradients pays on 8 nodes: the best, " in told(found)
    assert "Use fewer nodes, larger batches" in told(found)


def test_something_pays_on_fewer_nodes_than_asked_for() -> None:
    found = projection(STUDY, methods=PredictOptions(methods="allreduce,bf16"), pays=0.95)
    assert recommend(found)[1].startswith(
        "Nothing pays on 8 nodes; allreduce bf16 comes furthest: 4 nodes "
    )


def test_a_faster_link_pays() -> None:
    found = projection(STUDY)
    (sentence,) = (s for s in recommend(found) if "over links" in s)
    assert sentence == (
        "All-reduce would pay on 8 nodes over links that carry 10.6 Gbit/s; these are taken to "
        "carry 6.12 Gbit/s."
    )
    needed = (found.needed_bytes_per_s or 0) * 8 / 0.957
    assert "All-reduce pays on all" in told(projection(f"{needed * 1.01:.0f}bit"))
    assert "All-reduce pays on all" not in told(projection(f"{needed * 0.99:.0f}bit"))


def test_no_link_is_fast_enough_where_messages_take_their_time() -> None:
    """A ring of 64 on Gloo: 126 round-trips of 50 ms for every bucket."""
    found = projection(
        "100gbit", (64,), round_trip="50ms", assumed=Assumptions(library="gloo", machine=Machine())
    )
    assert found.needed_bytes_per_s is None
    assert "No link is fast enough for all-reduce to pay on 64 nodes" in told(found)


def test_the_cheapest_isnt_the_fastest() -> None:
    found = projection(STUDY, methods=PLAIN, price_per_hour=0.75)
    assert recommend(found)[-1] == (
        "Cheapest: 1 node, 8 min 46 s and 0.11 an epoch. Fastest: 8 nodes with allreduce, "
        "2 min 7 s and 0.212 an epoch: 4.14 times as fast for 1.93 times the money."
    )


def test_one_node_is_cheapest_and_fastest_where_the_network_is_slow() -> None:
    found = projection("10mbit", methods=PLAIN, price_per_hour=0.75)
    assert recommend(found)[-1] == "Cheapest and fastest: 1 node, 8 min 46 s and 0.11 an epoch."


def test_money_without_epochs() -> None:
    endless = replace(VGG, steps_per_epoch=0)
    assert "What an epoch costs isn't known" in told(
        projection("100gbit", profile=endless, price_per_hour=1.0)
    )


def test_a_fixed_cost_is_named() -> None:
    slow = replace(VGG, epoch=EpochCosts(snapshot_s=60.0))
    assert (
        "Evaluation, snapshot and the loader's start are 47 % of an epoch on 8 nodes: no way of "
        "combining gradients changes that." in told(projection("100gbit", profile=slow))
    )


def test_what_limits_is_said_of_the_method_that_is_recommended() -> None:
    failing = Assumptions(mtbf_s=1000 * 3600.0, snapshot_every_s=3600.0, machine=Machine())
    found = projection("100gbit", (256,), assumed=failing, pays=0.5)
    assert recommended(found).method.sync == "allreduce"
    assert _limits(found) == _limits(
        projection("100gbit", (256,), methods=PLAIN, assumed=failing, pays=0.5)
    )


def _limits(found: Projection) -> list[str]:
    return [sentence for sentence in recommend(found) if " of the time " in sentence]


def test_the_slowest_is_named() -> None:
    uneven = replace(
        VGG,
        step_s=Spread(median=STEP_S, low=STEP_S / 2, high=STEP_S * 2),
        workers=(WorkerTime(rank=0, host="a", compute_s=STEP_S, spread_s=STEP_S / 5),),
    )
    found = projection("100gbit", profile=uneven, methods=PLAIN)
    assert "Waiting for the slowest worker is 22 % of a step on 8 nodes" in told(found)


def test_failures_are_named() -> None:
    failing = Assumptions(mtbf_s=1000 * 3600.0, snapshot_every_s=3600.0, machine=Machine())
    found = projection("100gbit", (256,), assumed=failing)
    assert "of the time on 256 nodes: write snapshots more often" in told(found)
    often = replace(failing, snapshot_every_s=300.0, restart_s=1200.0)
    found = projection("100gbit", (256,), assumed=often)
    assert "most of it is starting again, for which 20 min are taken" in told(found)


def test_large_batches_are_named() -> None:
    assert "On 512 nodes a step takes 16,384 samples." in told(projection("100gbit", (512,)))
    assert "samples" not in told(projection("100gbit", (8,)))


def test_one_node() -> None:
    assert told(projection("100gbit", (1,))) == (
        "All-reduce pays on all of these sizes: 1 node reaches 1.00."
    )


@pytest.mark.parametrize("methods", ["bf16", "powersgd", "ordered", "allreduce"])
def test_any_method_alone_gets_an_answer(methods: str) -> None:
    assert recommend(projection("10mbit", methods=PredictOptions(methods=methods)))
    assert recommend(projection("100gbit", methods=PredictOptions(methods=methods)))
