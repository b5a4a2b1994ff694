"""What is computed around the measurements of scaling and prediction."""

import argparse
from itertools import pairwise

import pytest

from benchmarks import prediction, scaling
from benchmarks.emulated import vgg19
from benchmarks.prediction import SETTINGS, Case, Setting
from benchmarks.scaling import METHODS, PLAIN, Method, Plan, Row, modelled_s, own_compute, rate_for
from benchmarks.trials import Outcome, Wire
from paceline.gradient_sync.local_sgd.schedule import LocalPlan
from paceline.gradient_sync.options import LOCAL_METHODS, SyncOptions
from paceline.training.config import TrainConfig

COMPUTE = own_compute(vgg19(), 0.3, 0.31)


def outcome(step_s: float, sent_bytes: float = 1e6) -> Outcome:
    return Outcome(step_s=step_s, each_s=(), sent_bytes=sent_bytes, cores=0.5, profile=None)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_methods_are_options_of_a_training(method: Method) -> None:
    TrainConfig.from_settings(method.settings)


@pytest.mark.parametrize(
    "method",
    [m for m in METHODS if m.settings["sync"] in LOCAL_METHODS],
    ids=lambda method: method.name,
)
def test_a_window_holds_one_whole_exchange(method: Method) -> None:
    options = SyncOptions(**method.settings)  # type: ignore[arg-type]  # all are its own
    plan = LocalPlan(every=options.sync_every, delay=options.delay, parts=1)
    warm_up = options.sync_warmup_steps or 0
    window = range(method.lead - warm_up + 1, method.lead + method.steps - warm_up + 1)
    assert sum(len(plan.leaving(step)) for step in window) == 1
    assert sum(len(plan.arriving(step)) for step in window) == 1
    (left,) = (step for step in window if plan.leaving(step))
    assert left + plan.delay in window


def test_the_rate_gives_the_step_it_was_asked_for() -> None:
    for step_s in (0.4, 0.7, 1.5):
        assert modelled_s(rate_for(step_s, COMPUTE, 8), COMPUTE, 8) == pytest.approx(step_s)


def test_most_of_a_vgg_is_under_way_from_the_start_of_the_backward_pass() -> None:
    """Its largest layers are the last ones: all but the forward pass hides communication."""
    wire_s = 2 * 7 / 8 * vgg19().bytes / (scaling.GOODPUT * 100e6 / 8)
    assert modelled_s(100, COMPUTE, 8) == pytest.approx(0.1 + wire_s, rel=0.03)


def test_faster_links_are_never_slower() -> None:
    steps = [modelled_s(rate, COMPUTE, 8) for rate in (50, 200, 1000, 5000)]
    assert all(slow >= fast for slow, fast in pairwise(steps))
    assert steps[-1] == pytest.approx(COMPUTE.step_s, rel=0.1)


def test_a_row_compares_with_one_host_alone() -> None:
    row = Row(workers=8, method="bf16", outcomes=[outcome(0.5), outcome(0.4), outcome(0.8)])
    assert row.efficiencies(0.4) == pytest.approx([0.8, 1.0, 0.5])
    assert row.cells(0.4)[2:5] == ("500 (400-800)", "0.800 (0.500-1.000)", "1.00")


def test_gates_on_the_most_hosts() -> None:
    plan = Plan(sizes=(1, 8), methods=METHODS[:2], repeats=1, compute_s=0.3)
    rows = {
        (8, PLAIN.name): Row(workers=8, method=PLAIN.name, outcomes=[outcome(1.0)]),
        (8, "bf16"): Row(workers=8, method="bf16", outcomes=[outcome(0.5)]),
    }
    assert [f.met for f in scaling.judge(rows, plan, 0.46)] == [None, True, True]
    assert [f.met for f in scaling.judge(rows, plan, 0.40)] == [None, False, False]


def test_the_quick_plan_has_no_gates() -> None:
    plan = scaling.planned(argparse.Namespace(quick=True, only="", first=False))
    assert PLAIN in plan.methods
    rows = {(2, PLAIN.name): Row(workers=2, method=PLAIN.name, outcomes=[outcome(9.0)])}
    assert not any(figure.met is False for figure in scaling.judge(rows, plan, 0.1))


def test_the_settings_are_many_and_varied() -> None:
    assert len({setting.title for setting in SETTINGS}) == len(SETTINGS) >= 12
    assert {setting.workers for setting in SETTINGS} == {2, 4, 8}
    assert {setting.network for setting in SETTINGS} == {"vgg19", "resnet50"}
    rates = [setting.rate for setting in SETTINGS]
    assert (min(rates), max(rates)) == (50, 1000)
    assert len({setting.method.name for setting in SETTINGS}) >= 2


def case(setting: Setting, measured_s: float) -> Case:
    wire = Wire(bandwidth_bytes_per_s=1e7, round_trip_s=5e-5)
    said = prediction.predict(setting, COMPUTE, wire)
    found = [outcome(measured_s * said.step_s)]
    return Case(setting=setting, predicted=said, alone_s=0.31, wire=wire, outcomes=found)


@pytest.mark.parametrize(
    ("measured", "met"),
    [
        ([1.0, 1.03, 0.9], [True, True]),
        ([1.0, 1.0, 2.0], [True, False]),
        ([1.1] * 3, [False, True]),
    ],
)
def test_errors_are_held_to_the_promise(measured: list[float], met: list[bool]) -> None:
    cases = [case(s, share) for s, share in zip(SETTINGS, measured, strict=False)]
    assert [figure.met for figure in prediction.judge(cases)] == met


def test_half_the_bytes_take_less_time() -> None:
    wire = Wire(bandwidth_bytes_per_s=1e7, round_trip_s=5e-5)
    plain, half = (
        prediction.predict(
            Setting(network="vgg19", workers=8, rate=80, method=method), COMPUTE, wire
        )
        for method in METHODS[:2]
    )
    assert half.sent_bytes == plain.sent_bytes / 2
    assert half.step_s < plain.step_s
