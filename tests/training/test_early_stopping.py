import pytest

from paceline.results.metrics_table import Metrics, best_row
from paceline.training.options import LoopOptions
from paceline.training.progress import (
    describe_too_long,
    expected_eval_s,
    fit_total_steps,
    note_validation,
    reserve_s,
    stop_reason,
)
from paceline.training.snapshots.train_state import StopReason, TrainState

Results = list[tuple[float | None, float | None]]
"""(validation accuracy, validation loss) an epoch."""


def run(results: Results, options: LoopOptions) -> tuple[TrainState, list[bool], StopReason | None]:
    """Judge epoch after epoch, to the end or to the last result."""
    state, bests, reason = TrainState(), [], None
    for accuracy, loss in results:
        state.epoch += 1
        state.val_accuracy, state.val_loss = accuracy, loss
        bests.append(note_validation(state, options))
        reason = stop_reason(state, options)
        if reason is not None:
            break
    return state, bests, reason


@pytest.mark.parametrize(
    ("options", "results", "reason", "epochs"),
    [
        (LoopOptions(epochs=2), [(0.1, 1.0)] * 3, "epochs", 2),
        (LoopOptions(target_accuracy=0.9), [(0.8, 1.0), (0.9, 1.0), (0.7, 1.0)], "target", 2),
        (
            LoopOptions(target_accuracy=0.9, patience=2),
            [(0.9, 1.0), (0.8, 1.0), (0.95, 1.0), (0.9, 1.0)],
            "target",
            4,
        ),
        (LoopOptions(early_stopping=2), [(0.5, 1.0), (0.4, 1.0), (0.5, 1.0)], "patience", 3),
        (LoopOptions(early_stopping=2), [(0.5, 1.0), (0.4, 1.0), (0.6, 1.0)], None, 3),
        (LoopOptions(target_accuracy=None), [(1.0, 0.0)], None, 1),
        (LoopOptions(epochs=1, target_accuracy=0.5), [(0.6, 1.0)], "target", 1),
        (LoopOptions(early_stopping=1), [(None, 3.0), (None, 2.0), (None, 2.5)], "patience", 3),
    ],
)
def test_what_ends_a_training(
    options: LoopOptions, results: Results, reason: str | None, epochs: int
) -> None:
    state, _, found = run(results, options)
    assert (found, state.epoch) == (reason, epochs)


@pytest.mark.parametrize(
    ("options", "results", "bests"),
    [
        (LoopOptions(), [(0.5, 2.0), (0.6, 3.0), (0.55, 1.0)], [True, True, False]),
        # Equal accuracies: the lower loss is better.
        (LoopOptions(), [(0.5, 2.0), (0.5, 1.9), (0.5, 1.95)], [True, True, False]),
        (
            LoopOptions(best_by="val_loss"),
            [(0.5, 2.0), (0.6, 3.0), (0.1, 1.0)],
            [True, False, True],
        ),
        (LoopOptions(), [(None, 2.0), (None, 1.0), (None, 1.0)], [True, True, False]),
        # Without a loss (a script gives none, or it isn't finite) the accuracy alone counts.
        (LoopOptions(), [(0.5, None), (0.4, None), (0.6, None)], [True, False, True]),
        (LoopOptions(), [(0.5, None), (0.6, 1.0), (0.7, None)], [True, True, False]),
        (LoopOptions(best_by="val_loss"), [(0.5, 2.0), (0.6, float("nan"))], [True, False]),
    ],
)
def test_which_epoch_is_the_best(options: LoopOptions, results: Results, bests: list[bool]) -> None:
    state, found, _ = run(results, options)
    assert found == bests
    best = len(bests) - bests[::-1].index(True)
    assert state.best_epoch == best
    assert (state.best_val_accuracy, state.best_val_loss) == results[best - 1]
    # Whoever reads the table later finds the same one.
    nan = float("nan")
    columns = {
        "val_accuracy": tuple(nan if accuracy is None else accuracy for accuracy, _ in results),
        "val_loss": tuple(nan if loss is None else loss for _, loss in results),
    }
    assert best_row(Metrics(columns=columns), options.best_by) == best - 1


def test_steps_are_fitted_to_the_time_that_is_left() -> None:
    state = TrainState(step=100, elapsed_s=10.0)
    fitted = fit_total_steps(state, most_steps=10_000, budget_s=60.0, reserve_s=5.0)
    assert fitted == 100 + 450


@pytest.mark.parametrize(
    ("step", "elapsed_s", "fitted"),
    [
        (0, 0.0, 1000),  # nothing measured yet
        (0, 3.0, 1000),
        (100, 1.0, 1000),  # all epochs fit
        (100, 58.0, 100),  # no time left: never fewer steps than were taken
    ],
)
def test_the_limits_of_a_fit(step: int, elapsed_s: float, fitted: int) -> None:
    state = TrainState(step=step, elapsed_s=elapsed_s)
    assert fit_total_steps(state, most_steps=1000, budget_s=60.0, reserve_s=5.0) == fitted


def test_how_long_an_evaluation_is_expected_to_take() -> None:
    assert expected_eval_s(TrainState(), None, 500) == 0.0
    trained = TrainState(samples_seen=1000, train_s=10.0)
    assert expected_eval_s(trained, None, 500) == pytest.approx(5.0)
    assert expected_eval_s(trained, 3.0, 500) == 3.0
    measured = TrainState(samples_seen=1000, train_s=10.0, eval_s=2.0)
    assert expected_eval_s(measured, 3.0, 500) == 2.0


@pytest.mark.parametrize(("eval_s", "kept_s"), [(0.0, 1.0), (2.0, 3.5), (70.0, 50.0)])
def test_time_kept_back_for_the_last_evaluation(eval_s: float, kept_s: float) -> None:
    assert reserve_s(eval_s, budget_s=100.0) == pytest.approx(kept_s)


def test_an_evaluation_that_does_not_fit_is_told_beforehand() -> None:
    assert describe_too_long(15.0, "30s", 30.0) is None
    told = describe_too_long(78.0, "30s", 30.0)
    assert told is not None
    assert "about 1 min 18 s by their first batches" in told
    assert "time budget of 30s: it will end after about 1 min 33 s" in told
