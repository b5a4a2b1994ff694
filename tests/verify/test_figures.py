"""Printed figures: which of them tell of a fault, and which do not."""

import pytest

from paceline.verify.compare import compare
from paceline.verify.detectors.figures import metrics
from paceline.verify.events import Drawn, Event, PassEnded, Printed
from paceline.verify.finding import Case
from paceline.verify.trace import Trace, collect_trace
from tests.verify.made import trained


@pytest.mark.parametrize("is_cut", [True, False])
def test_evaluations_that_were_cut_off_have_other_sums(is_cut: bool) -> None:
    traces = []
    for workers, line in ((1, "right 30"), (2, "right 60")):
        ranks: list[list[Event]] = [
            [*trained(["1"], 1.0, 1.0), Drawn(1, 0, ("7",), ()), PassEnded(1, 0, is_cut)]
            for _ in range(workers)
        ]
        ranks[0].append(Printed(line))
        traces.append(collect_trace(ranks))
    first, other = traces
    case = Case(first=first, other=other, comparison=compare(first, other), beyond=None)
    assert len(list(metrics(case))) == (not is_cut)


def printing(workers: int, *lines: str) -> Trace:
    ranks: list[list[Event]] = [list(trained(["1"], 1.0, 1.0)) for _ in range(workers)]
    ranks[0] += map(Printed, lines)
    return collect_trace(ranks)


def causes(one: str, two: str, workers: int = 2) -> list[str]:
    first, other = printing(1, one), printing(workers, two)
    case = Case(first=first, other=other, comparison=compare(first, other), beyond=None)
    return [str(finding.cause) for finding in metrics(case)]


@pytest.mark.parametrize(
    ("one", "two", "workers"),
    [
        ("accuracy 0.8125", "accuracy 0.4062", 2),
        ("accuracy 81.25%", "accuracy 27.08%", 3),
        ("epoch 1: right 30", "epoch 1: right 60", 2),
        ("val loss 1.5e-3", "val loss 3.0e-3", 2),
        ("80.0% accuracy", "40.0% accuracy", 2),
    ],
)
def test_a_factor_of_the_workers(one: str, two: str, workers: int) -> None:
    assert causes(one, two, workers) == ["metric-factor"]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("accuracy 0.8125", "accuracy 0.8125"),
        ("accuracy 0.8125", "accuracy 0.8124"),
        ("accuracy 0.0", "accuracy 0.0"),
        ("accuracy 0.01", "accuracy 0.00"),
        ("12.5 images/s", "25.0 images/s"),
        ("{'eval_runtime': '0.04'}", "{'eval_runtime': '0.02'}"),
        ("eval: 3.0 sec", "eval: 1.5 sec"),
        ("eval 40 samples per second", "eval 80 samples per second"),
        ("world size 1", "world size 2"),
        ("accuracy 0.5, lr 0.1", "accuracy 0.5, lr 0.2"),
        ("accuracy 0.8 of rank 0", "another line with accuracy 0.4"),
    ],
)
def test_what_is_no_fault(one: str, two: str) -> None:
    assert causes(one, two) == []
