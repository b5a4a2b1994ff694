import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from paceline.metrics import counters
from paceline.metrics.counters import StepCounters, Totals, count_correct

NO_SCORES = torch.zeros(2, 3)
NO_TARGETS = torch.zeros(2, dtype=torch.int64)


def totals_of(counted: StepCounters) -> Totals:
    return Totals.from_row(counted.rows().sum(0))


def batches(classes: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (
            torch.randn(size, classes, generator=generator),
            torch.randint(0, classes, (size,), generator=generator),
        )
        for size in (8, 8, 3, 1)
    ]


@pytest.mark.parametrize("top", [1, 5])
@pytest.mark.parametrize("most_uncounted", [1 << 18, 100, 0])
def test_totals_equal_a_direct_computation(
    most_uncounted: int, top: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters, "_MOST_UNCOUNTED", most_uncounted)
    counted = StepCounters(top)
    for step, (outputs, targets) in enumerate(batches(9)):
        counted.add(F.cross_entropy(outputs, targets), len(targets), step, outputs, targets)
        if step == 1:
            assert counted.flush() is None  # fetching in between changes nothing
    assert counted.flush() is None
    outputs, targets = (torch.cat(part) for part in zip(*batches(9), strict=True))
    totals = totals_of(counted)
    assert totals.samples == 20
    loss = F.cross_entropy(outputs.double(), targets, reduction="sum")
    assert totals.loss == pytest.approx(float(loss), rel=1e-6)
    assert totals.top1 == int((outputs.argmax(1) == targets).sum())
    within = outputs.argsort(1, descending=True)[:, :top] == targets[:, None]
    assert totals.top5 == int(within.sum())
    assert totals.mean_loss == totals.loss / 20
    assert totals.accuracy == totals.top1 / 20
    assert totals.top5_accuracy == totals.top5 / 20


@pytest.mark.parametrize("top", [1, 5])
def test_right_guesses_by_place(top: int) -> None:
    outputs, targets = batches(9)[0]
    places = outputs.argsort(1, descending=True)[:, :top] == targets[:, None]
    assert torch.equal(count_correct(outputs, targets, top), places.sum(0))


@pytest.mark.parametrize(("classes", "top"), [(3, 1), (5, 1), (6, 5), (1000, 5)])
def test_the_first_scores_settle_how_many_guesses_count(classes: int, top: int) -> None:
    counted = StepCounters(None)
    scores = torch.eye(2, classes)
    counted.add(torch.tensor(0.5), 2, 0, scores, torch.tensor([0, 1]))
    counted.flush()
    assert (counted.top, totals_of(counted).top1, totals_of(counted).top5) == (top, 2, 2)


def test_without_accuracy() -> None:
    counted = StepCounters()
    counted.add(torch.tensor(0.5), len(NO_TARGETS), 0, NO_SCORES, NO_TARGETS)
    counted.flush()
    assert totals_of(counted) == Totals(loss=1.0, samples=2)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_the_first_loss_that_isnt_finite_is_named(bad: float) -> None:
    counted = StepCounters()
    for step, loss in enumerate([1.0, bad, 1.0, bad], start=40):
        counted.add(torch.tensor(loss), len(NO_TARGETS), step, NO_SCORES, NO_TARGETS)
    assert counted.flush() == 41
    assert counted.flush() is None


def test_reset_starts_from_zero_or_from_what_was_saved() -> None:
    counted = StepCounters(1)
    counted.add(torch.tensor(0.5), len(NO_TARGETS), 0, NO_SCORES, NO_TARGETS)
    counted.reset(Totals(loss=1.0, samples=2, top1=1, top5=2).as_row().unsqueeze(0))
    assert counted.flush() is None
    assert totals_of(counted) == Totals(loss=1.0, samples=2, top1=1, top5=2)
    counted.reset()
    assert totals_of(counted) == Totals()


def test_rows_add_up() -> None:
    one, two = Totals(loss=0.1, samples=3, top1=1, top5=2), Totals(loss=0.2, samples=4, top1=2)
    assert Totals.from_row(one.as_row()) == one
    both = Totals.from_row(one.as_row() + two.as_row())
    assert both == Totals(loss=0.1 + 0.2, samples=7, top1=3, top5=2)


def test_nothing_counted_is_no_figure() -> None:
    empty = Totals()
    assert all(map(math.isnan, (empty.mean_loss, empty.accuracy, empty.top5_accuracy)))


def test_the_losses_of_shards_are_summed_apart() -> None:
    counted = StepCounters(1, parts=range(4, 6))
    for step in range(2):
        for part, loss in ((4, 0.1), (5, 0.7)):
            value = torch.tensor(loss + step)
            counted.add(value, len(NO_TARGETS), step, NO_SCORES, NO_TARGETS, part)
    counted.flush()
    rows = counted.rows()
    assert rows[:, 1].tolist() == [4.0, 4.0]
    torch.testing.assert_close(rows[:, 0], torch.tensor([2.4, 4.8], dtype=torch.float64))
    assert totals_of(counted).samples == 8
    later = StepCounters(1, parts=range(5, 6))
    later.reset(rows[1:])
    assert torch.equal(later.rows(), rows[1:])
