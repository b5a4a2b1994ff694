"""What is computed around the measurements of scaling and prediction, and how networks wait."""

import pytest
import torch
import torchvision

from benchmarks import prediction, scaling
from benchmarks.emulated import Pacer, resnet50, vgg19
from benchmarks.prediction import SETTINGS, Case
from benchmarks.scaling import METHODS, PLAIN, Method, Row
from benchmarks.trials import Outcome, Wire
from paceline.gradient_sync.cost_model import Compute
from paceline.training.config import TrainConfig
from tests.scaling.vgg import profile_of

PROFILE = profile_of(0.31)
COMPUTE = Compute.of(PROFILE)


def outcome(step_s: float) -> Outcome:
    return Outcome(step_s=step_s, sent_bytes=1e6, profile=PROFILE)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_methods_are_options_of_a_training(method: Method) -> None:
    TrainConfig.from_settings(method.settings)


def test_a_row_compares_with_one_host_alone() -> None:
    row = Row(workers=8, method="bf16", outcomes=[outcome(0.5), outcome(0.4), outcome(0.8)])
    assert row.efficiencies(0.4) == pytest.approx([0.8, 1.0, 0.5])
    assert row.cells(0.4)[2:5] == ("500 (400-800)", "0.800 (0.500-1.000)", "1.00")


def test_all_reduce_has_to_reach_the_studys_efficiency() -> None:
    rows = {(8, PLAIN.name): Row(workers=8, method=PLAIN.name, outcomes=[outcome(1.0)])}
    assert [f.met for f in scaling.judge(rows, 0.46, gates=True)] == [None, True]
    assert [f.met for f in scaling.judge(rows, 0.40, gates=True)] == [None, False]
    assert [f.met for f in scaling.judge(rows, 0.40, gates=False)] == [None, None]


@pytest.mark.parametrize(
    ("measured", "met"),
    [
        ([1.0, 1.03, 0.9], [True, True]),
        ([1.0, 1.0, 2.0], [True, False]),
        ([1.1] * 3, [False, True]),
    ],
)
def test_errors_are_held_to_the_promise(measured: list[float], met: list[bool]) -> None:
    cases = []
    for setting, share in zip(SETTINGS, measured, strict=False):
        wire = Wire(bandwidth_bytes_per_s=1e7, round_trip_s=5e-5)
        said = prediction.predict(setting, COMPUTE, wire)
        outcomes = [outcome(share * said.step_s)]
        cases.append(
            Case(setting=setting, predicted=said, alone_s=0.31, wire=wire, outcomes=outcomes)
        )
    assert [figure.met for figure in prediction.judge(cases)] == met


def test_emulated_networks_have_the_real_ones_parameters() -> None:
    for shape, build in (
        (vgg19(1), lambda: torchvision.models.vgg19(num_classes=20)),
        (resnet50(1), torchvision.models.resnet50),
    ):
        with torch.device("meta"):
            expected = [tuple(p.shape) for p in build().parameters()]
        assert [one for layer in shape.layers for one in layer.shapes] == expected


def test_a_wait_that_was_too_long_shortens_the_next() -> None:
    now_s, slept = 5.0, list[float]()

    def sleep(seconds: float) -> None:
        nonlocal now_s
        slept.append(seconds)
        now_s += seconds + 0.25

    pacer = Pacer(lambda: now_s, sleep)
    pacer.begin()
    for _ in range(4):
        pacer.spend(1.0)
    assert slept == [1.0, 0.75, 0.75, 0.75]
