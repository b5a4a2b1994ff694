"""Printed figures: which of them tell of a fault, and which do not."""

import pytest

from paceline.verify.compare import compare
from paceline.verify.detectors.figures import figures
from paceline.verify.events import Drawn, Event, PassEnded, Printed, Reduced
from paceline.verify.finding import Case
from paceline.verify.trace import Trace
from tests.verify.made import trace_of, trained


@pytest.mark.parametrize("is_cut", [True, False])
def test_evaluations_that_were_cut_off_have_other_sums(is_cut: bool) -> None:
    traces = []
    for workers, line in ((1, "right 30.5"), (2, "right 61.5")):
        ranks: list[list[Event]] = [
            [*trained(["1"], 1.0, 1.0), Drawn(1, 0, ("7",), ()), PassEnded(1, 0, is_cut)]
            for _ in range(workers)
        ]
        ranks[0].append(Printed(line))
        traces.append(trace_of(ranks))
    first, other = traces
    case = Case(first=first, other=other, comparison=compare(first, other), beyond=None)
    assert len(list(figures(case))) == (not is_cut)


def printing(workers: int, line: str, reduced: float | None = None) -> Trace:
    ranks: list[list[Event]] = [list(trained(["1"], 1.0, 1.0)) for _ in range(workers)]
    for _ in range(2):  # in one line alone it may be near by chance
        ranks[0].append(PassEnded(0, 0, False))
        if reduced is not None:
            ranks[0].append(Reduced("SUM", (reduced,)))
        ranks[0].append(Printed(line))
    return trace_of(ranks)


def causes(one: str, two: str, workers: int = 2, reduced: float | None = None) -> list[str]:
    first, other = printing(1, one), printing(workers, two, reduced)
    case = Case(first=first, other=other, comparison=compare(first, other), beyond=None)
    return [str(finding.cause) for finding in figures(case)]


@pytest.mark.parametrize(
    ("one", "two", "workers", "reduced"),
    [
        ("accuracy 0.8125", "accuracy 0.4062", 2, 0.8125),  # divided by the ranks once more
        ("accuracy 81.25%", "accuracy 27.08%", 3, 0.2708),
        ("epoch 1: right 30", "epoch 1: right 60", 2, 60),
        ("val loss 1.5e-3", "val loss 3.0e-3", 2, 3e-3),
        ("80.0% accuracy", "40.0% accuracy", 2, 0.4),
    ],
)
def test_a_factor_of_the_workers(one: str, two: str, workers: int, reduced: float) -> None:
    assert causes(one, two, workers, reduced) == ["metric-factor"]


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ("accuracy 0.8125", "accuracy 0.4062"),
        ("rmse 0.978", "rmse 0.692"),
        ("mrr 0.537", "mrr nan"),
        ("loss inf", "loss 2.5"),
        ("anything at all 1.25", "anything at all 1.75"),
    ],
)
def test_figures_that_differ_are_noted(one: str, two: str) -> None:
    assert causes(one, two) == ["figure-differs"]


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
        ("accumulation 4", "accumulation 2"),
        ("Test: [4/4]", "Test: [2/2]"),
        ("validation has 32 batches", "validation has 16 batches"),
        ("mrr nan", "mrr nan"),
        ("tok/sec 812.5", "tok/sec 1630.1"),
        ("step 3 dt 0.4312", "step 3 dt 0.2218"),
        ("accuracy 0.8 of rank 0", "another line with accuracy 0.4"),
    ],
)
def test_what_is_no_fault(one: str, two: str) -> None:
    assert causes(one, two) == []
