"""Progress of a training: step, epoch and clock; decides when to save, stop and keep the best.

The same on every worker.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, final

from paceline.data.loading.dataset_worker import shorten
from paceline.data.order import epoch_order, step_shares
from paceline.errors import JobError
from paceline.options.durations import format_duration, parse_duration_s
from paceline.results.metrics_table import is_better
from paceline.training.batches.plan import TrainPlan
from paceline.training.hooks.learning_rate import LearningRateSchedule
from paceline.training.options import LoopOptions
from paceline.training.snapshots.train_state import StopReason, TrainState, finite
from paceline.training.status_exchange import Agreement, steps_to_next

_MAX_POSTPONED_S = 1.5
"""By so much the end on a signal waits for an update: launchers kill after a few seconds."""
_VALIDATION = ("loss", "accuracy", "top5_accuracy")
"""Figures of an evaluation that have a place of their own."""
_LONG_EVALUATION_S = 2.0
"""Longer than this, and a snapshot is taken before it."""

_LONG_STEP_S = 1.0
"""A step that is longer than this isn't begun where the time budget ends within it."""


@final
@dataclass(kw_only=True)
class TrainingProgress:
    """Position and clock of a training. Changes only by values that are equal on all workers.

    One object, since when to evaluate, save and stop is decided by position and clock together.
    """

    loop: LoopOptions
    snapshot_every_steps: int | None
    snapshot_every_s: float | None
    log_every_steps: int | None = None
    """The workers exchange their status after each so many steps at least."""
    plan: TrainPlan | None = None
    """How an epoch is cut into steps; None until there is a training loader."""
    val_samples: int = 0
    """Samples of the last evaluation, or of the one to come where that is known."""
    test_samples: int = 0
    """Samples that are evaluated once more when the training is over."""
    timed_eval_s: float | None = None
    """How long an evaluation takes on the slowest worker, by its first batches."""
    rate: LearningRateSchedule | None = None
    """The schedule of the learning rate, where it isn't the script's own."""
    state: TrainState = field(default_factory=TrainState)
    stopping: Literal["time", "signal"] | None = None
    """Why the workers have agreed to stop before the end of the epoch."""
    has_seen_all: bool = False
    """Whether this epoch's training data has come to its end."""
    data_s: float = 0.0
    """Time that this worker's host has waited for data since the last exchange."""
    next_agreement: int = 0
    saves_next: bool = False
    """Whether a snapshot is to be taken once the open step is over."""
    saves_best: bool = False
    """Whether that is the best one by validation."""
    """The step after which the workers exchange their status again: about once a second."""
    ends_s: deque[float] = field(default_factory=lambda: deque(maxlen=11))
    """When the newest steps ended, by this worker's clock."""
    _interval: int = 1
    _last_agreement: int = 0
    _lap_from_s: float = field(default_factory=perf_counter)
    _unsaved_s: float = 0.0
    _is_warm: bool = False
    _kept_back_s: float = 0.0
    _closing_eval_s: float = 0.0
    _stop_asked_s: float | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch; 0 where that isn't known beforehand."""
        return self.plan.steps_per_epoch if self.plan else 0

    @property
    def can_continue(self) -> bool:
        """Whether there is anything left to train."""
        return self.state.ended is None and self.stopping is None

    @property
    def epoch_is_complete(self) -> bool:
        """Whether nothing is left of the epoch but its evaluation."""
        if self.plan is not None and not self.steps_per_epoch:
            return self.has_seen_all
        return self.state.step_in_epoch >= self.steps_per_epoch

    def begin(self) -> None:
        """Note what the training set is, for the snapshots."""
        if self.plan is not None:
            self.state.train_samples = self.plan.train_samples
            self.state.global_batch = self.plan.global_batch
            self.state.total_steps = self._most_steps()

    def resume(self, state: TrainState) -> None:
        """Go on from a snapshot's position, as far as today's options allow.

        Raises:
            JobError: The training set or the global batch has another size than at the beginning.
        """
        samples = self.plan.train_samples if self.plan else 0
        batch = self.plan.global_batch if self.plan else 0
        if state.global_batch != batch:
            raise JobError(
                f"the training began with a global batch of {state.global_batch}, and now it is "
                f"{batch}: its steps would be other samples. Keep it, or start a new training"
            )
        if state.train_samples != samples:
            raise JobError(
                f"the training began with {state.train_samples} training samples, and now there "
                f"are {samples}: an epoch can't be finished on another data set"
            )
        at_boundary = state.step_in_epoch == 0 and state.epoch > 0
        ran_out_of_time = state.ended == "time"
        state.ended = stop_reason(state, self.loop) if at_boundary else None
        state.total_steps = self._most_steps()
        self.state = state
        self._last_agreement = self.next_agreement = state.step
        self._fit_schedule()
        if ran_out_of_time:
            self._check_clock()  # unless there is more time now, nothing is left to do

    @property
    def step_s(self) -> float:
        """Mean time of the last ten steps on this worker; 0 before the second."""
        ends_s = self.ends_s
        return (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) if len(ends_s) > 1 else 0.0

    def step_to_sample(self) -> int:
        """Choose the step, from 0, whose times are taken next.

        The last one before the next exchange; where the epoch ends before that, the last but one of
        the epoch: its last step may be a short one.
        """
        state, length = self.state, self.steps_per_epoch
        ordinary = self.next_agreement - 1
        if not length:
            return ordinary
        ends = state.step + length - state.step_in_epoch % length
        within = ends - 2
        if within < state.step:
            within += length  # in the next epoch
        return min(ordinary, within) if length > 2 else min(ordinary, ends - 1)

    def due_to_save(self) -> bool:
        """Tell whether a snapshot is due by steps or, since the last exchange, by time."""
        every = self.snapshot_every_steps
        every_s = self.snapshot_every_s
        if (every is None or self.state.step % every) and (
            every_s is None or self._unsaved_s < every_s
        ):
            return False
        # The end of the epoch has a snapshot of its own.
        return self.state.step_in_epoch != self.steps_per_epoch

    def save_after_step(self, *, best: bool) -> None:
        """Take a snapshot once the open step is over."""
        self.saves_next, self.saves_best = True, self.saves_best or best
        self.next_agreement = self.state.step

    def saved(self) -> None:
        """Note that a snapshot has been taken."""
        self._unsaved_s = 0.0
        self.saves_next = self.saves_best = False

    def postpones_stop(self) -> bool:
        """Tell whether the end on a signal may wait for an update: by the clock, alike on all."""
        if self.stopping != "signal":
            return False
        if self._stop_asked_s is None:
            self._stop_asked_s = self.state.elapsed_s
        return self.state.elapsed_s - self._stop_asked_s < _MAX_POSTPONED_S

    def lap(self) -> float:
        """Take the time since the last call."""
        now_s = perf_counter()
        lap_s, self._lap_from_s = now_s - self._lap_from_s, now_s
        return lap_s

    def advance(self, agreed: Agreement) -> int:
        """Advance clock and counts by an exchange.

        Returns:
            Steps since the exchange before.
        """
        state = self.state
        state.elapsed_s += agreed.lap_s
        state.train_s += agreed.lap_s
        state.epoch_train_s += agreed.lap_s
        state.epoch_data_s += agreed.data_s
        self.data_s = 0.0
        self._unsaved_s += agreed.lap_s
        if agreed.signalled:
            self.stopping = "signal"
        # The clock decides here whether the training ends by its time budget.
        steps = state.step - self._last_agreement
        if self.loop.time_budget is not None:
            self._fit_schedule()
            self._check_clock(self._until_next_s(agreed.lap_s, steps))
        # When to exchange next: about a second on, or at the next row that is due.
        self._last_agreement = state.step
        if steps:
            # A GPU's host runs ahead of it, and has waited for it in the exchange alone.
            step_s = max(agreed.step_s, agreed.lap_s / steps)
            self._interval = steps_to_next(step_s, self._interval)
        self.next_agreement = state.step + self._interval
        if every := self.log_every_steps:
            self.next_agreement = min(self.next_agreement, (state.step // every + 1) * every)
        return steps

    def add_pause(self, lap_s: float) -> None:
        """Advance the clock by time that wasn't spent on steps."""
        self.state.elapsed_s += lap_s
        self._unsaved_s += lap_s

    def add_evaluation(self, lap_s: float) -> None:
        """Advance the clock by an evaluation."""
        self.add_pause(lap_s)
        self.state.eval_s = lap_s
        if self.stopping is not None:
            self._closing_eval_s += lap_s

    def close_epoch(self, *, validated: bool) -> bool:
        """Go on to the next epoch, or to the end.

        Args:
            validated: Whether the state holds this epoch's validation figures.

        Returns:
            Whether they are the best so far.
        """
        state = self.state
        complete = self.epoch_is_complete or self.stopping != "time"
        if complete:
            self._check_clock()  # one more step would need one more evaluation
        if complete:
            state.epoch += 1
            state.step_in_epoch = 0
            self.has_seen_all = False
            state.epoch_train_s = state.epoch_data_s = 0.0
        best = note_validation(state, self.loop) if validated else False
        state.ended = stop_reason(state, self.loop) if complete else None
        if self.stopping == "time":
            state.ended = state.ended or "time"
        return best

    def close_loop(self, *, validated: bool) -> bool:
        """End a training without epochs: its script has come to the end of its loop.

        Returns:
            Whether they are the best so far.
        """
        best = note_validation(self.state, self.loop) if validated else False
        self.state.ended = "time" if self.stopping == "time" else "script"
        return best

    def take_validation(
        self, figures: Mapping[str, float], samples: int, *, is_first: bool = True
    ) -> dict[str, float]:
        """Make an evaluation's figures the epoch's validation result.

        Args:
            samples: Over how many.
            is_first: Of the epoch's evaluations; a further one replaces what it has as well.

        Returns:
            Those that have no place of their own, to be logged.
        """
        state = self.state
        if is_first:
            state.val_loss = state.val_accuracy = state.val_top5_accuracy = None
        if is_first or any(name in figures for name in _VALIDATION):
            self.val_samples = samples
        if "loss" in figures:
            state.val_loss = finite(figures["loss"])
        if "accuracy" in figures:
            state.val_accuracy = finite(figures["accuracy"])
        if "top5_accuracy" in figures:
            state.val_top5_accuracy = finite(figures["top5_accuracy"])
        if "loss" in figures and state.val_loss is None:
            state.val_accuracy = state.val_top5_accuracy = None  # of a model that has diverged
        return {f"val_{name}": value for name, value in figures.items() if name not in _VALIDATION}

    def describe_bad(self, step: int, rank: int, advice: str) -> str:
        """Say where a loss wasn't finite; every worker knows the order of samples, so each can."""
        samples = self.samples_of(step, rank)
        where = f", for the training samples {shorten(samples, most=64)}" if samples else ""
        return (
            f"the loss became NaN or infinite at epoch {self.state.epoch + 1}, step {step + 1}, "
            f"on rank {rank}{where}. {advice}; if it is always the same samples, look at them"
        )

    def samples_of(self, step: int, rank: int) -> list[int]:
        """List the training samples that a worker saw in a step of this epoch."""
        plan, state = self.plan, self.state
        if plan is None or not plan.shuffle:
            return []
        step_in_epoch = state.step_in_epoch - (state.step - step)
        epoch = plan.epoch(self.loop.seed, state.epoch, step_in_epoch, rank)
        shares = step_shares(epoch, plan.train_samples, step_in_epoch)
        order = epoch_order(plan.train_samples, self.loop.seed, state.epoch)
        return [int(sample) for sample in order[shares[0].start : shares[-1].stop]]

    @property
    def expects_long_evaluation(self) -> bool:
        """Whether a signal may leave no time to finish the next evaluation."""
        return self.expected_eval_s() > _LONG_EVALUATION_S

    def expected_eval_s(self) -> float:
        """Estimate how long the next evaluation takes."""
        return expected_eval_s(self.state, self.timed_eval_s, self.val_samples)

    def closing_evals_s(self) -> float:
        """Estimate how long the evaluations at the end take: on the test set as well."""
        test = self.test_samples / self.val_samples if self.val_samples else 0.0
        return self.expected_eval_s() * (1.0 + test)

    @property
    def budget_s(self) -> float | None:
        """The time budget in seconds."""
        budget = self.loop.time_budget
        return None if budget is None else parse_duration_s(budget)

    def describe_budget(self, saving_s: float) -> dict[str, float] | None:
        """Say what became of the time budget, and what the end of the training took of it.

        Args:
            saving_s: For the last snapshot, after all that the clock has counted.
        """
        if self.budget_s is None:
            return None
        return {
            "budget_s": self.budget_s,
            "used_s": self.state.elapsed_s + saving_s,
            "kept_back_s": self._kept_back_s,
            "evaluation_s": self._closing_eval_s,
            "snapshot_s": saving_s,
        }

    def _most_steps(self) -> int:
        return self.loop.epochs * self.steps_per_epoch

    def _fit_schedule(self) -> None:
        """Fit the schedule to what the time budget allows at the pace so far."""
        budget = self._budget()
        if budget is None:
            return
        budget_s, kept_s = budget
        self.state.total_steps = fit_total_steps(
            self.state, most_steps=self._most_steps(), budget_s=budget_s, reserve_s=kept_s
        )
        if self.rate is not None:
            self.rate.schedule = self.rate.schedule.with_total_steps(self.state.total_steps)

    def _check_clock(self, until_next_s: float = 0.0) -> None:
        """Stop where only the time for the last evaluation and snapshot is left."""
        budget = self._budget()
        if budget is None or self.stopping is not None:
            return
        budget_s, kept_s = budget
        if self.state.elapsed_s + until_next_s >= budget_s - kept_s:
            self.stopping, self._kept_back_s = "time", kept_s

    def _until_next_s(self, lap_s: float, steps: int) -> float:
        """Estimate the time to the next check of the clock, where steps are so long that it counts.

        The first step of a start is no measure: it warms up.
        """
        is_first, self._is_warm = not self._is_warm, self._is_warm or steps > 0
        if is_first or not steps or lap_s / steps < _LONG_STEP_S:
            return 0.0
        return lap_s / steps

    def _budget(self) -> tuple[float, float] | None:
        """Give the time budget and what is kept back of it, in seconds."""
        if self.budget_s is None:
            return None
        return self.budget_s, reserve_s(self.closing_evals_s(), budget_s=self.budget_s)


def note_validation(state: TrainState, options: LoopOptions) -> bool:
    """Take in an epoch's validation figures.

    Args:
        state: With this epoch's `val_loss` and `val_accuracy`, at its end or (out of time) in its
            middle; its best figures and runs of epochs are brought up to date.
        options: The target, and what makes a result better.

    Returns:
        Whether this epoch is the best so far.
    """
    better = is_better(
        (state.val_loss, state.val_accuracy),
        (state.best_val_loss, state.best_val_accuracy),
        options.best_by,
    )
    state.epochs_without_gain = 0 if better else state.epochs_without_gain + 1
    if better:
        state.best_val_accuracy = state.val_accuracy
        state.best_val_loss = state.val_loss
        state.best_epoch = state.epoch + (state.step_in_epoch > 0)  # counted from 1
    accuracy, target = state.val_accuracy, options.target_accuracy
    met = target is not None and accuracy is not None and accuracy >= target
    state.epochs_on_target = state.epochs_on_target + 1 if met else 0
    return better


def stop_reason(state: TrainState, options: LoopOptions) -> StopReason | None:
    """Tell after an epoch whether the training is over, and why."""
    if options.target_accuracy is not None and state.epochs_on_target >= options.patience:
        return "target"
    if options.early_stopping and state.epochs_without_gain >= options.early_stopping:
        return "patience"
    if state.epoch >= options.epochs:
        return "epochs"
    return None


def fit_total_steps(
    state: TrainState, *, most_steps: int, budget_s: float, reserve_s: float
) -> int:
    """Estimate the steps that a time budget allows, at the pace so far.

    Args:
        state: Its clock and steps give the pace, evaluations and snapshots included.
        most_steps: Steps of all epochs.
        reserve_s: Time kept back for the last evaluation and snapshot.
    """
    if state.step == 0 or state.elapsed_s <= 0:
        return most_steps
    left_s = budget_s - reserve_s - state.elapsed_s
    possible = state.step + int(left_s * state.step / state.elapsed_s)
    return max(state.step, min(most_steps, possible))


def expected_eval_s(state: TrainState, timed_s: float | None, eval_samples: int) -> float:
    """Estimate how long the next evaluation takes.

    Args:
        state: Says how long the last one took, and how fast training is.
        timed_s: What its first batches say, where they have been timed.
        eval_samples: Its samples: where nothing has been timed, one is taken to run no faster than
            training does.
    """
    if state.eval_s is not None:
        return state.eval_s
    if timed_s is not None:
        return timed_s
    images_per_s = state.samples_seen / state.train_s if state.train_s > 0 else 0.0
    return eval_samples / images_per_s if images_per_s else 0.0


def reserve_s(eval_s: float, *, budget_s: float) -> float:
    """Choose the time to keep back for the evaluations and the snapshot at the end.

    Args:
        eval_s: How long these evaluations are expected to take.
        budget_s: The whole time budget; half of it always goes to training.
    """
    return min(budget_s / 2, 1.25 * eval_s + 1.0)


def describe_too_long(eval_s: float, budget: str, budget_s: float) -> str | None:
    """Say before the training that its evaluations don't fit into its time budget.

    Args:
        eval_s: How long the evaluations at the end are expected to take.
        budget_s: The same, in seconds.
    """
    if eval_s <= budget_s / 2:
        return None
    return (
        f"The evaluations at the end take about {format_duration(eval_s)} by their first batches, "
        f"more than half of the time budget of {budget}: it will end after about "
        f"{format_duration(budget_s / 2 + eval_s)}. Give a longer --time-budget, or fewer samples "
        "to evaluate on"
    )
