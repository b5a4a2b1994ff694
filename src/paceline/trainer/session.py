"""A worker's handle on the training that it is part of."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Literal, final

import torch
from torch import nn

from paceline.config.durations import parse_duration_s
from paceline.data.batch import Batch
from paceline.data.order import epoch_order, step_indices
from paceline.data.source import BatchSource
from paceline.dist.group import Group
from paceline.errors import JobError, NonFiniteLossError
from paceline.launch.boundary import StepNote
from paceline.metrics.console import Advance, Console
from paceline.metrics.counters import Totals
from paceline.metrics.table import EpochRow
from paceline.trainer.agreement import Agreement, Status, agree, steps_to_next
from paceline.trainer.config import TrainConfig
from paceline.trainer.evaluate import Evaluator, averaged_buffers
from paceline.trainer.keeper import SnapshotKeeper
from paceline.trainer.plan import TrainPlan
from paceline.trainer.recorder import Recorder
from paceline.trainer.signals import StopFlag
from paceline.trainer.state import TrainState
from paceline.trainer.step import Stepper
from paceline.trainer.stopping import fit_total_steps, note_validation, reserve_s, stop_reason


@final
@dataclass(kw_only=True)
class Session:
    """Everything that one worker trains with. Built by `trainer.setup`, used by `trainer.loop`."""

    config: TrainConfig
    plan: TrainPlan
    group: Group
    model: nn.Module
    """The unwrapped model."""
    channels_last: bool
    """Whether images and convolutions are laid out channels-last."""
    stepper: Stepper
    evaluator: Evaluator
    train_source: BatchSource
    val_source: BatchSource
    keeper: SnapshotKeeper
    recorder: Recorder
    console: Console
    stop_flag: StopFlag
    note: StepNote
    state: TrainState = field(default_factory=TrainState)
    stopping: Literal["time", "signal"] | None = None
    """Why the workers have agreed to stop before the end of the epoch."""
    _next_agreement: int = 0
    _last_agreement: int = 0
    _lap_from_s: float = field(default_factory=perf_counter)
    _data_s: float = 0.0
    _unsaved_s: float = 0.0

    def resume(self, state: TrainState) -> None:
        """Go on from a snapshot's position, as far as today's options allow.

        Raises:
            JobError: The training set has another size than the one the training began with.
        """
        if state.train_samples != self.plan.train_samples:
            raise JobError(
                f"the training began with {state.train_samples} training samples, and now there "
                f"are {self.plan.train_samples}: an epoch can't be finished on another data set"
            )
        most = self.config.loop.epochs * self.plan.steps_per_epoch
        at_boundary = state.step_in_epoch == 0 and state.epoch > 0
        ran_out_of_time = state.ended == "time"
        state.ended = stop_reason(state, self.config.loop) if at_boundary else None
        state.total_steps = most
        self.state = state
        self._last_agreement = self._next_agreement = state.step
        self._fit_schedule()
        if ran_out_of_time:
            self._look_at_clock()  # unless there is more time now, nothing is left to do

    def start_clock(self) -> None:
        """Begin to count training time: setting up doesn't belong to it."""
        self._lap()

    def can_continue(self) -> bool:
        """Tell whether there is anything left to train."""
        return self.state.ended is None and self.stopping is None

    def batches(self) -> Iterator[Batch]:
        """Give this worker's batches from where the training stands to the end of the epoch."""
        state = self.state
        plan = self.plan.epoch(
            self.config.loop.seed, state.epoch, state.step_in_epoch, self.group.rank
        )
        source = iter(self.train_source.train_batches(plan))
        while True:
            self.note.operation = "data"
            asked_s = perf_counter()
            batch = next(source, None)
            self._data_s += perf_counter() - asked_s
            if batch is None:
                return
            yield batch

    def step(self, batch: Batch) -> None:
        """Take one optimizer step: forward, backward, combine, update. Collective."""
        state = self.state
        self.note.step = state.step + 1
        self.note.operation = "step"
        self.stepper.run(batch, state.step)
        state.step += 1
        state.step_in_epoch += 1

    def due_to_agree(self) -> bool:
        """Tell whether it is time for `agree`: about twice a second."""
        return self.state.step >= self._next_agreement

    def due_to_save(self) -> bool:
        """Tell whether a snapshot is due by steps or, since the last agreement, by time."""
        options, state = self.config.snapshots, self.state
        if state.step_in_epoch == self.plan.steps_per_epoch:
            return False  # the epoch's own snapshot follows
        if options.snapshot_every_steps and state.step % options.snapshot_every_steps == 0:
            return True
        every_s = options.every_s
        return every_s is not None and self._unsaved_s >= every_s

    def agree(self) -> Agreement:
        """Count, and learn what the other workers know. Collective.

        Raises:
            NonFiniteLossError: A worker's loss became NaN or infinite since the last time.
        """
        self.note.operation = "agree"
        bad_step = self.stepper.counters.flush()
        agreed = agree(
            Status(
                signalled=self.stop_flag.name is not None,
                bad_step=bad_step,
                totals=self.stepper.counters.totals,
                lap_s=self._lap(),
                data_s=self._data_s,
            ),
            self.group,
        )
        self._data_s = 0.0
        if agreed.bad is not None:
            raise self._non_finite(*agreed.bad)
        self._take_in(agreed)
        return agreed

    def close_epoch(self, trained: Totals) -> bool:
        """Evaluate, judge whether to go on, and record the epoch. Collective.

        Args:
            trained: The epoch's sums over all workers.

        Returns:
            Whether this is the best validation result so far.
        """
        state, loop = self.state, self.config.loop
        started_s = state.elapsed_s
        validated = self.evaluate()
        state.eval_s = state.elapsed_s - started_s
        state.train_loss = trained.mean_loss
        row = self._row(trained, validated)
        complete = state.step_in_epoch == self.plan.steps_per_epoch
        if complete:
            state.epoch += 1
            state.step_in_epoch = 0
        best = note_validation(state, loop)
        state.ended = stop_reason(state, loop) if complete else None
        if self.stopping == "time":
            state.ended = state.ended or "time"
        self.recorder.add(row)
        if complete:
            state.epoch_train_s = state.epoch_data_s = 0.0
            self.stepper.counters.reset()
        return best

    def evaluate(self) -> Totals:
        """Evaluate on the validation set, with all workers' running statistics. Collective."""
        self.note.operation = "evaluate"
        with averaged_buffers(self.model, self.group):
            validated, _ = self.evaluator.run(self.model, self.val_source, self.group)
        state, top = self.state, self.evaluator.top
        state.val_loss = _finite(validated.mean_loss)
        state.val_accuracy = _finite(validated.accuracy) if top else None
        state.val_top5_accuracy = _finite(validated.top5_accuracy) if top == 5 else None
        self._settle_clock()
        return validated

    def snapshot(self, *, best: bool = False, must: bool = False) -> None:
        """Save everything needed to go on exactly. Collective; written in the background.

        Args:
            best: Also keep it as the best by validation.
            must: Where the one before is still being written, wait for it rather than skip this.
        """
        self.agree()
        self.note.operation = "snapshot"
        if not self.keeper.weights_are_finite():
            raise NonFiniteLossError(
                f"the weights became NaN or infinite by step {self.state.step}. "
                f"{self.keeper.advice()} Try a lower --lr, a warm-up or --clip-norm"
            )
        self._unsaved_s = 0.0
        self.keeper.save(self.state, best=best, must=must)

    def _lap(self) -> float:
        now_s = perf_counter()
        lap_s, self._lap_from_s = now_s - self._lap_from_s, now_s
        return lap_s

    def _settle_clock(self) -> None:
        """Advance the common clock by rank 0's time since the last exchange. Collective."""
        lap = torch.tensor([self._lap()], dtype=torch.float64)
        lap_s = float(self.group.gather_rows(lap)[0, 0])
        self.state.elapsed_s += lap_s
        self._unsaved_s += lap_s

    def _take_in(self, agreed: Agreement) -> None:
        state = self.state
        state.elapsed_s += agreed.lap_s
        state.train_s += agreed.lap_s
        state.epoch_train_s += agreed.lap_s
        state.epoch_data_s += agreed.data_s
        self._unsaved_s += agreed.lap_s
        before = self.plan.samples_after(self.plan.steps_per_epoch) * state.epoch
        state.samples_seen = before + self.plan.samples_after(state.step_in_epoch)
        if agreed.signalled:
            self.stopping = "signal"
        self._fit_schedule()
        self._look_at_clock()
        steps = state.step - self._last_agreement
        self._last_agreement = state.step
        self._next_agreement = state.step + steps_to_next(agreed.lap_s, steps)
        if steps:
            self.console.advance(self._advance(agreed, steps))

    def _fit_schedule(self) -> None:
        """Fit the schedule to what the time budget allows at the pace so far."""
        budget = self._budget()
        if budget is None:
            return
        budget_s, kept_s = budget
        most = self.config.loop.epochs * self.plan.steps_per_epoch
        self.state.total_steps = fit_total_steps(
            self.state, most_steps=most, budget_s=budget_s, reserve_s=kept_s
        )
        rate = self.stepper.rate
        rate.schedule = rate.schedule.with_total_steps(self.state.total_steps)

    def _look_at_clock(self) -> None:
        """Stop where only the time for the last evaluation and snapshot is left."""
        budget = self._budget()
        if budget is not None and self.state.elapsed_s >= budget[0] - budget[1]:
            self.stopping = self.stopping or "time"

    def _budget(self) -> tuple[float, float] | None:
        """Give the time budget and what is kept back of it, in seconds."""
        budget = self.config.loop.time_budget
        if budget is None:
            return None
        budget_s = parse_duration_s(budget)
        samples = self.val_source.num_samples
        return budget_s, reserve_s(self.state, budget_s=budget_s, eval_samples=samples)

    def _advance(self, agreed: Agreement, steps: int) -> Advance:
        state = self.state
        images_per_s = steps * self.plan.global_batch / agreed.lap_s
        left = state.total_steps - state.step
        return Advance(
            epoch=state.epoch + 1,
            epochs=self.config.loop.epochs,
            step=state.step_in_epoch,
            steps=self.plan.steps_per_epoch,
            loss=agreed.totals.mean_loss,
            accuracy=agreed.totals.accuracy if self.evaluator.top else None,
            images_per_s=images_per_s,
            lr=self.stepper.rate.lr_at(state.step - 1),
            eta_s=left * state.elapsed_s / max(1, state.step),
        )

    def _row(self, trained: Totals, validated: Totals) -> EpochRow:
        state, top = self.state, self.evaluator.top
        seconds, steps = state.epoch_train_s, max(1, state.step_in_epoch)
        row = EpochRow(
            epoch=state.epoch + 1,
            step=state.step,
            time_s=state.elapsed_s,
            train_loss=trained.mean_loss,
            val_loss=validated.mean_loss,
            lr=self.stepper.rate.lr_at(state.step - 1),
            images_per_s=trained.samples / seconds if seconds > 0 else 0.0,
            batch_time_s=seconds / steps,
            data_time_s=state.epoch_data_s / steps,
        )
        if top:
            row = replace(row, train_accuracy=trained.accuracy, val_accuracy=validated.accuracy)
        if top == 5:
            row = replace(
                row,
                train_top5_accuracy=trained.top5_accuracy,
                val_top5_accuracy=validated.top5_accuracy,
            )
        return row

    def _non_finite(self, step: int, rank: int) -> NonFiniteLossError:
        """Every worker knows the order of samples, so each can name those of the bad step."""
        state = self.state
        step_in_epoch = state.step_in_epoch - (state.step - step)
        order = epoch_order(self.plan.train_samples, self.config.loop.seed, state.epoch)
        samples = step_indices(
            order, step_in_epoch, self.plan.global_batch, rank, self.plan.world_size
        ).tolist()
        return NonFiniteLossError(
            f"the loss became NaN or infinite at epoch {state.epoch + 1}, step {step + 1}, on rank "
            f"{rank}, for the training samples {_shorten(samples)}. {self.keeper.advice()} Try a "
            "lower --lr, a warm-up or --clip-norm; if it is always the same samples, look at them"
        )


def _finite(value: float) -> float | None:
    """Turn what isn't a result (no samples, an overflow in evaluation) into None."""
    return value if math.isfinite(value) else None


def _shorten(samples: list[int]) -> str:
    shown = ", ".join(map(str, samples[:64]))
    return f"{shown} and {len(samples) - 64} more" if len(samples) > 64 else shown
