"""Position and clock of a training, told by exchanges with laps of known length."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Literal, cast

import pytest
import torch

from paceline.distributed.work_division import Division
from paceline.errors import JobError
from paceline.metrics.counters import Totals
from paceline.training.batches.plan import TrainPlan
from paceline.training.context import TrainingContext
from paceline.training.hooks.metrics_logger import describe_advance
from paceline.training.options import LoopOptions
from paceline.training.progress import TrainingProgress
from paceline.training.snapshots.train_state import TrainState
from paceline.training.status_exchange import Agreement

STEPS = 10
PLAN = TrainPlan(
    division=Division.of(None, 2),
    global_batch=8,
    batch_per_worker=(4, 4),
    micro_batches=1,
    train_samples=80,
    drop_last=False,
    steps_per_epoch=STEPS,
)


def make_progress(
    *,
    every_steps: int | None = None,
    every_s: float | None = None,
    budget: str | None = None,
    plan: TrainPlan | None = PLAN,
    **state: float,
) -> TrainingProgress:
    return TrainingProgress(
        loop=LoopOptions(epochs=3, time_budget=budget),
        snapshot_every_steps=every_steps,
        snapshot_every_s=every_s,
        plan=plan,
        state=TrainState(**state),  # type: ignore[arg-type]  # numbers of both kinds
    )


def agreement(lap_s: float, data_s: float = 0.0, *, signalled: bool = False) -> Agreement:
    nothing = torch.zeros(1, 4, dtype=torch.float64)
    return Agreement(
        signalled=signalled,
        bad=None,
        totals=Totals.from_row(nothing[0]),
        lap_s=lap_s,
        data_s=data_s,
        waits_s=(0.0, 0.0),
        counted=nothing,
        more=nothing,
    )


def go(progress: TrainingProgress, steps: int) -> None:
    progress.state.step += steps
    progress.state.step_in_epoch += steps
    progress.state.samples_seen += 8 * steps


def test_the_clock_counts_steps_and_pauses() -> None:
    progress = make_progress()
    go(progress, 4)
    assert progress.advance(agreement(2.0, data_s=0.5)) == 4
    progress.add_pause(3.0)
    go(progress, 2)
    assert progress.advance(agreement(1.0, data_s=0.25)) == 2
    state = progress.state
    assert (state.elapsed_s, state.train_s) == (6.0, 3.0)
    assert (state.epoch_train_s, state.epoch_data_s) == (3.0, 0.75)


def test_the_wait_for_data_is_of_one_exchange() -> None:
    progress = make_progress()
    progress.data_s = 0.5
    progress.advance(agreement(1.0, data_s=0.5))
    assert progress.data_s == 0.0


def test_exchanges_come_about_once_a_second_however_fast_the_first_steps_were() -> None:
    progress = make_progress()
    assert progress.next_agreement == 0
    exchanged = []
    while progress.state.step < 24:
        go(progress, 1)
        if progress.state.step >= progress.next_agreement:
            exchanged.append(progress.state.step)
            step_s = 0.001 if progress.state.step < 10 else 0.25
            progress.advance(replace(agreement(0.1), step_s=step_s))
    assert exchanged == [1, 3, 7, 15, 19, 23]


def test_an_exchange_comes_with_each_row_that_was_asked_for() -> None:
    progress = make_progress()
    progress.log_every_steps = 3
    exchanged = []
    while progress.state.step < 9:
        go(progress, 1)
        if progress.state.step >= progress.next_agreement:
            exchanged.append(progress.state.step)
            fast = replace(agreement(0.001), step_s=0.0001)  # a second would be 10,000 steps
            progress.advance(fast)
    assert exchanged == [1, 3, 6, 9]


def test_a_snapshot_is_due_by_time_since_the_last_one_pauses_included() -> None:
    progress = make_progress(every_s=10.0)
    go(progress, 1)
    progress.advance(agreement(6.0))
    assert not progress.due_to_save()
    progress.add_pause(4.0)
    assert progress.due_to_save()
    progress.saved()
    assert not progress.due_to_save()
    go(progress, 1)
    progress.advance(agreement(9.0))
    assert not progress.due_to_save()
    progress.advance(agreement(1.0))
    assert progress.due_to_save()


def test_a_snapshot_is_due_by_steps_but_at_an_epochs_end_that_one_is_enough() -> None:
    progress, due = make_progress(every_steps=5), []
    for _ in range(STEPS):
        go(progress, 1)
        due.append(progress.due_to_save())
    assert [step + 1 for step, is_due in enumerate(due) if is_due] == [5]


def test_steps_between_snapshots_may_be_more_than_an_epoch_has() -> None:
    progress, due = make_progress(every_steps=STEPS + 2), []
    for _ in range(2):
        for _ in range(STEPS):
            go(progress, 1)
            due.append(progress.due_to_save())
        progress.close_epoch(validated=False)
    assert [step + 1 for step, is_due in enumerate(due) if is_due] == [STEPS + 2]


def test_none_is_due_by_itself() -> None:
    progress = make_progress()
    go(progress, 5)
    progress.advance(agreement(1e6))
    assert not progress.due_to_save()


def test_of_an_epochs_end_nothing_stays() -> None:
    progress = make_progress(plan=replace(PLAN, steps_per_epoch=0))  # a stream
    go(progress, 4)
    progress.advance(agreement(2.0, data_s=1.0))
    complete = [progress.epoch_is_complete]
    progress.has_seen_all = True
    complete.append(progress.epoch_is_complete)
    progress.close_epoch(validated=False)
    complete.append(progress.epoch_is_complete)
    assert complete == [False, True, False]
    state = progress.state
    assert (state.epoch, state.step, state.step_in_epoch) == (1, 4, 0)
    assert (state.epoch_train_s, state.epoch_data_s) == (0.0, 0.0)
    assert (state.elapsed_s, state.train_s) == (2.0, 2.0)


def test_an_epoch_is_complete_with_its_last_step() -> None:
    progress = make_progress()
    go(progress, STEPS - 1)
    assert not progress.epoch_is_complete
    go(progress, 1)
    assert progress.epoch_is_complete


@pytest.mark.parametrize(
    ("signalled", "lap_s", "why"),
    [
        (False, 1.0, None),
        (True, 1.0, "signal"),
        (False, 99.0, "time"),
        (True, 99.0, "signal"),  # it came first, and what is saved for it is gone on with
    ],
)
def test_what_stops_within_an_epoch(
    signalled: bool, lap_s: float, why: Literal["time", "signal"] | None
) -> None:
    progress = make_progress(budget="60s")
    go(progress, 4)
    progress.advance(agreement(lap_s, signalled=signalled))
    assert progress.stopping == why
    assert progress.can_continue == (why is None)


def test_out_of_time_a_part_of_an_epoch_is_the_end() -> None:
    progress = make_progress(budget="60s")
    go(progress, 4)
    progress.advance(agreement(99.0))
    progress.close_epoch(validated=False)
    assert (progress.state.ended, progress.state.epoch, progress.state.step_in_epoch) == (
        "time",
        0,
        4,
    )


def test_after_a_signal_the_epoch_that_ended_with_it_counts() -> None:
    progress = make_progress(budget="60s")
    go(progress, STEPS)
    progress.advance(agreement(1.0, signalled=True))
    progress.close_epoch(validated=False)
    assert (progress.state.ended, progress.state.epoch) == (None, 1)


def test_time_for_the_last_evaluation_and_snapshot_is_kept_back() -> None:
    # An evaluation took 8 s: a quarter more and a second, 11 s of the 100 are kept back.
    progress = make_progress(budget="100s", eval_s=8.0)
    go(progress, 4)
    progress.advance(agreement(88.5))
    assert progress.stopping is None
    progress.advance(agreement(1.0))
    assert progress.stopping == "time"


def test_the_schedule_is_fitted_to_the_steps_that_the_time_allows() -> None:
    # 10 steps in 25 s; 100 s less 11 s that are kept back leave time for 25 more.
    progress = make_progress(budget="100s", eval_s=8.0)
    progress.begin()
    assert progress.state.total_steps == 3 * STEPS
    go(progress, STEPS)
    progress.advance(agreement(50.0))
    assert progress.state.total_steps == 10 + 7  # 39 s at 5 s each


def test_a_pause_takes_steps_from_the_schedule() -> None:
    progress = make_progress(budget="100s", eval_s=8.0)
    go(progress, STEPS)
    progress.add_pause(25.0)
    progress.advance(agreement(25.0))
    assert progress.state.total_steps == 10 + 7


def test_only_epochs_that_are_over_are_the_last_one() -> None:
    progress, ends = make_progress(), []
    for _ in range(3):
        go(progress, STEPS)
        progress.advance(agreement(1.0))
        progress.close_epoch(validated=False)
        ends.append(progress.state.ended)
    assert ends == [None, None, "epochs"]
    assert not progress.can_continue


def test_validation_figures_make_the_best_epoch() -> None:
    progress = make_progress()
    for number, (accuracy, best) in enumerate([(0.5, True), (0.4, False), (0.6, True)]):
        go(progress, STEPS)
        figures = {"loss": 1.0, "accuracy": accuracy, "own": 3.0}
        assert progress.take_validation(figures, samples=20) == {"val_own": 3.0}
        assert progress.close_epoch(validated=True) == best, number
    assert progress.state.best_epoch == 3
    assert progress.val_samples == 20


def test_of_a_model_that_diverged_no_accuracy_counts() -> None:
    progress = make_progress()
    progress.take_validation({"loss": float("nan"), "accuracy": 0.9, "top5_accuracy": 1.0}, 20)
    state = progress.state
    assert (state.val_loss, state.val_accuracy, state.val_top5_accuracy) == (None, None, None)


def test_goes_on_where_a_snapshot_stands() -> None:
    saved = TrainState(
        epoch=1, step=14, step_in_epoch=4, train_samples=80, global_batch=8, elapsed_s=7.0
    )
    progress = make_progress(budget="1h")
    progress.resume(saved)
    go(progress, 1)
    assert progress.advance(agreement(0.5)) == 1  # steps of this start alone
    assert progress.state.elapsed_s == 7.5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"global_batch": 16}, "global batch of 16, and now it is 8"),
        ({"train_samples": 81}, "81 training samples, and now there are 80"),
    ],
)
def test_other_data_or_another_batch_is_refused(change: dict[str, int], said: str) -> None:
    saved = TrainState(**{"train_samples": 80, "global_batch": 8, **change})  # type: ignore[arg-type]
    with pytest.raises(JobError, match=said):
        make_progress().resume(saved)


@pytest.mark.parametrize(("budget", "ended"), [("60s", True), ("120s", False), (None, False)])
def test_a_training_that_ran_out_of_time_goes_on_where_there_is_more(
    budget: str | None, ended: bool
) -> None:
    saved = TrainState(step=4, step_in_epoch=4, train_samples=80, global_batch=8, elapsed_s=59.0)
    saved.ended = "time"
    progress = make_progress(budget=budget)
    progress.resume(saved)
    assert progress.can_continue != ended


def test_a_long_evaluation_is_expected_by_the_last_one_or_by_the_pace_of_training() -> None:
    progress = make_progress()
    assert progress.expected_eval_s() == 0.0
    progress.val_samples = 80
    go(progress, STEPS)
    progress.advance(agreement(1.0))  # 80 samples a second
    assert (progress.expected_eval_s(), progress.expects_long_evaluation) == (1.0, False)
    progress.state.eval_s = 3.0
    assert (progress.expected_eval_s(), progress.expects_long_evaluation) == (3.0, True)


@pytest.mark.parametrize(
    ("samples", "steps", "seen"),
    [(20, 1, 8), (20, 3, 20), (5, 1, 5)],  # a batch of 8: whole, the last of 4, larger than the set
)
def test_the_speed_shown_counts_the_samples_that_there_were(
    samples: int, steps: int, seen: int
) -> None:
    progress = make_progress()
    assert progress.plan is not None
    progress.plan = replace(progress.plan, train_samples=samples)
    go(progress, steps)
    optimizers = SimpleNamespace(optimizers=[])
    context = SimpleNamespace(progress=progress, components=optimizers, gpu=None, unit="images")
    shown = describe_advance(cast(TrainingContext, context), agreement(2.0), steps, None, top=None)
    assert shown.images_per_s == seen / 2.0
