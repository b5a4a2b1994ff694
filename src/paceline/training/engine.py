"""What runs a training underneath the session: steps, exchanges, epochs, evaluation, snapshots."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.data.batch import Batch, pieces
from paceline.distributed.group import Group
from paceline.distributed.work_division import Division
from paceline.errors import InterruptedTraining, NonFiniteLossError
from paceline.files import storing
from paceline.launch.heartbeat import StepNote
from paceline.metrics.console import Console
from paceline.metrics.counters import StepCounters, Totals
from paceline.results.run_directory import RunDirectory
from paceline.training.batches.empty_batch import StandIn
from paceline.training.batches.load_balancing import SpeedMeter, rebalance
from paceline.training.batches.loader import (
    EvalLoader,
    Loader,
    refuse_between_shards,
    refuse_eval_batch,
    refuse_pass,
)
from paceline.training.components import Parts
from paceline.training.config import TrainConfig
from paceline.training.early_stopping import describe_too_long
from paceline.training.epoch_metrics import epoch_row, last_lr, progress, with_validation
from paceline.training.evaluation.distributed_mean import Figures, Judge
from paceline.training.evaluation.evaluator import evaluating, time_batches
from paceline.training.metrics_logger import Recorder
from paceline.training.observer import Watcher
from paceline.training.optimizer_step import NEVER_STEPPED, Stepper
from paceline.training.profiling.profile_writer import Profiler
from paceline.training.progress import Course
from paceline.training.rng import RandomStreams
from paceline.training.signals import StopFlag
from paceline.training.snapshots.manager import SnapshotKeeper
from paceline.training.status_exchange import NOTHING, Agreement, Status, agree, agree_on_pause
from paceline.training.step_checks import Guard
from paceline.training.step_counter import FreeSteps
from paceline.training.sync.base import GradientSync, has_hook

_TIMING_S = 2.0
"""For timing an evaluation by its first batches, at most, or one batch."""


@final
@dataclass(kw_only=True)
class Engine:
    """A worker's machinery. Every method but the properties is collective unless it says not."""

    config: TrainConfig
    run: RunDirectory
    group: Group
    course: Course
    parts: Parts
    stepper: Stepper
    counters: StepCounters
    keeper: SnapshotKeeper
    recorder: Recorder
    console: Console
    stop_flag: StopFlag
    note: StepNote
    profiler: Profiler
    random: RandomStreams
    guard: Guard | None
    announce: "Callable[[Engine], None]"
    """Called once the position is known: tells the user what begins."""
    division: Division
    """Which parts of a step each worker goes through."""
    sync: GradientSync
    """Combines the workers' gradients."""
    watcher: Watcher | None = None
    """Is told of every step: what `paceline verify` looks through."""
    meter: SpeedMeter | None = None
    """Measures this worker's speed, where batches are to be shared by it."""
    begun: bool = False
    channels_last: bool = False
    """Whether images and convolutions are laid out channels-last."""
    train_loader: Loader | None = None
    """The loader whose steps are counted: the first one."""
    loaders: list[Loader | EvalLoader] = field(default_factory=list)
    logged: Figures = field(default_factory=dict)
    """Figures of the script's own for the epoch's row."""
    figures: Figures = field(default_factory=dict)
    """Those of the last epoch that was recorded here."""
    batch: Batch | None = None
    """What the script has been given to train on, while that step isn't over."""
    free: FreeSteps | None = None
    """Counts the steps where there is no training loader."""
    is_updating: bool = False
    """Whether an optimizer's step is ours; one that a script takes itself would be on its own."""
    holds_pieces: bool = False
    """Whether pieces of the open batch have left gradients that others will be added to."""
    _has_gradients: bool = False
    """Whether there was a backward pass since the batch was given, or since the last update."""
    _loss_before: Tensor | None = None
    """Of the backward passes about the same batch that came before."""
    _unstepped: int = 0
    """Batches that have gone by without an update."""
    _counted: int = -1
    """The last step whose loss has been counted: a second one belongs to another optimizer."""
    _epoch_is_open: bool = False
    """Whether the body of `epochs` is running."""
    _passed: bool = False
    """Whether the epoch's pass over the training loader has begun."""
    _left: bool = False
    """Whether the script has left its loop early, and the pass hasn't been ended."""
    _syncs_after_step: bool = field(init=False)
    """Whether `sync` has anything to do after a step."""
    _syncs_at_end: bool = field(init=False)
    """Whether it has at the end of a pass over the training loader."""
    _stand_in: StandIn = field(default_factory=StandIn)
    _trained: Totals | None = None
    _validated: bool = False
    _lr: float | None = None
    """Of the epoch's last step: the script may step its scheduler before the epoch is recorded."""

    def __post_init__(self) -> None:
        """Look once which hooks there are: what isn't there takes no time in a step."""
        self._syncs_after_step = has_hook(self.sync, "after_step")
        self._syncs_at_end = has_hook(self.sync, "end_epoch")

    def set_epochs(self, count: int) -> None:
        """Settle how long to train. Local to the worker."""
        self.course.loop = replace(self.config.loop, epochs=count)
        self.config = replace(self.config, loop=self.course.loop)

    def before_collective(self, call: str) -> None:
        """End a pass that was left; refuse what all do together between two shards of a step."""
        if self._left:
            self._close_pass()
        if self.division.is_fixed:
            refuse_between_shards(self.batch, call)

    def release(self) -> None:
        """End all reader processes, and give the models their own forward pass back. Local."""
        self.sync.close()
        self.stepper.release()
        for loader in self.loaders:
            loader.close()

    def begin(self) -> None:
        """Restore the newest snapshot, if there is one, and start the clock."""
        self.begun = True
        self.note.operation = "restore"
        self.course.begin()
        self.keeper.statistics.forget()  # the models may have been changed since they came in
        self.parts.per_part.begin(self.division.parts_of(self.group.rank))
        with storing(self.run.path):
            restored = self.keeper.restore_newest()
        if restored is not None:
            self.course.resume(restored)
            if restored.step_in_epoch and self.train_loader is not None:
                self.parts.note_resumed()
        self.sync.setup(self.course.state.step)
        if self.guard is not None:
            self.guard.look(0)
        with storing(self.run.metrics_csv):
            self.recorder.start(self.course.state, self.keeper.restored_rows)
        self.parts.for_each_model(nn.Module.train)
        self.announce(self)
        if self.watcher is not None:
            self.watcher.begin(self.parts.models, self.parts.optimizers)
        self.course.lap()
        self.note.operation = "script"

    def epochs(self) -> Iterator[int]:
        """Go through the epochs that are left."""
        while self.course.can_continue:
            self.random.at_epoch(self.course.state.epoch)
            self._epoch_is_open, self._passed = True, False
            yield self.course.state.epoch
            self.close_epoch()

    def close_epoch(self) -> None:
        """Record the epoch, judge whether to go on, and save; nothing where none is open."""
        if not self._epoch_is_open:
            return
        self._epoch_is_open = False
        if self.free is not None and not self.course.state.step:
            return  # a script that trained nothing
        self._close_pass()
        if self._unstepped > 1:
            self.stepper.report(NEVER_STEPPED)
        trained = self._trained or self.agree().totals
        state = self.course.state
        state.train_loss = trained.mean_loss if trained.samples else None
        lr = last_lr(self.course, self.parts.optimizers) if self._lr is None else self._lr
        spent = self.profiler.close_epoch()
        row = epoch_row(state, trained, self.counters.top or 0, lr, self.logged, spent)
        row = with_validation(row, state) if self._validated else row
        if self.free is not None:
            row = replace(row, images_per_s=0.0)  # nobody knows how many samples a step had
        close = self.course.close_epoch if self.free is None else self.course.close_loop
        best = close(validated=self._validated)
        self.figures = dict(self.logged)
        self.recorder.add(row)
        if state.step_in_epoch == 0:
            self.counters.reset()
        self._trained, self._validated, self._lr, self.logged = None, False, None, {}
        with self.profiler.recording(self.course):
            self.snapshot(best=best, must=True)
        if self.course.stopping == "signal" and state.ended is None:
            raise InterruptedTraining

    def free_steps(self, count: int) -> Iterator[int]:
        """Go through the steps that are left of a loop without a training loader."""
        self._begin_free(by_updates=False)
        while self.course.can_continue and self.course.state.step < count:
            self._open_step()
            yield self.course.state.step
            self._count_step()
            self._do_what_is_due()

    def begin_free(self) -> None:
        """Count the steps of the script's own loop by its updates."""
        self._begin_free(by_updates=True)
        self._open_step()

    def _begin_free(self, *, by_updates: bool) -> None:
        self.free = FreeSteps(self.parts.optimizers, by_updates=by_updates)
        self._epoch_is_open = True

    def steps(self, loader: Loader) -> Iterator[Batch]:
        """Give the batches of what is left of the epoch; after each, do what is due.

        Raises:
            UsageError: Not within `epochs`, or for a second time in one epoch.
        """
        refuse_pass(is_open=self._epoch_is_open and self.free is None, passed=self._passed)
        self._passed, self._left = True, False
        self.parts.put_back()
        self.sync.begin_epoch()
        course, meter, most = self.course, self.meter, loader.plan.micro_batch
        is_plain = not self.division.is_fixed and self.watcher is None and meter is None
        whole = most if is_plain else -1  # what has more samples is given in pieces
        state, pace = course.state, self.stepper.pace
        pace.begin_pass(state.step)
        epoch, source = state.epoch, loader.read(state.epoch, state.step_in_epoch)
        limit, say = self.config.data.max_batch_per_worker, self.console.say
        try:
            while course.stopping is None:
                if meter is not None and rebalance(loader, meter, self.group, limit, say):
                    course.plan, most = loader.plan, loader.plan.micro_batch
                    source = loader.read(state.epoch, state.step_in_epoch)
                self.note.operation = "data"
                if state.step >= pace.next_look:
                    pace.look(state.step)
                asked_s = perf_counter()
                batch = next(source, None)
                course.data_s += perf_counter() - asked_s
                if batch is None:
                    course.has_seen_all = True
                    break
                if pace.is_looking:
                    pace.mark("batch")
                self._open_step()
                if not batch.local:
                    self._stand_in.begin(self.parts.model)
                if batch.local <= whole:
                    self.batch = batch
                    yield batch
                else:
                    yield from self._pieces(batch, most, source)
                self._count_step()
                self._do_what_is_due()
            self._trained = self.agree().totals
            self._lr = last_lr(self.course, self.parts.optimizers)
            self._heed_signal()
            self._close_pass()
        except GeneratorExit:  # the script leaves its loop early
            self._left = self._epoch_is_open and state.epoch == epoch
            self.note.operation = "script"
            raise
        self.note.operation = "script"

    def backward(
        self,
        loss: Tensor,
        outputs: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        more: bool = False,
    ) -> bool:
        """See `Session.backward`."""
        batch, self._has_gradients = self.batch, True
        if batch is None:
            return self._backward_alone(loss, more=more)
        if self.meter is not None:
            self.meter.end(batch.local)
        self.sync.backward(loss, batch, more=more)
        self.holds_pieces = not batch.last
        if self._loss_before is not None:
            loss, self._loss_before = self._loss_before + loss.detach(), None
        if more:
            self._loss_before = loss.detach()
            return False
        step = self.course.state.step
        if step != self._counted and batch.local:
            self.counters.add(loss, batch.local, step, outputs, targets, batch.part)
        if not batch.last:
            return False
        self._counted = step
        return True

    def _backward_alone(self, loss: Tensor, *, more: bool) -> bool:
        """Run a backward pass that isn't about a batch of the training loader."""
        refuse_eval_batch(self.loaders)
        if self.free is not None and self.free.take_due():
            self._do_what_is_due()
        self.sync.backward(loss, None, more=more)
        step = self.course.state.step
        if self.free is not None and step != self._counted:
            self._counted = step
            part = self.division.parts_of(self.group.rank).start
            self.counters.add(loss, 1, step, part=part)
        return not more

    def update(self, optimizer: Optimizer | None = None, *, forgets: bool = True) -> None:
        """See `Session.update`. Local to the worker, but where a snapshot is due."""
        batch = self.batch
        if batch is not None and not batch.last:
            return
        self._unstepped = 0
        optimizers = self.parts.optimizers if optimizer is None else (optimizer,)
        self.is_updating = True
        self.stepper.update(optimizers, forgets=forgets)
        self.is_updating = False
        if forgets:
            self._has_gradients = False
        if batch is None and self.free is not None and self.free.is_over_with(optimizers):
            self._count_step()
            self._open_step()

    def update_by_script(self, optimizer: Optimizer) -> None:
        """Do what an optimizer's own `step()` asks for, where `s.backward` has come before it.

        Raises:
            UsageError: It hasn't.
        """
        if not self._has_gradients:
            self.stepper.refuse_a_step_of_its_own()
        self.update(optimizer, forgets=False)

    def agree(self, more: Tensor = NOTHING) -> Agreement:
        """Count, and learn what the other workers know.

        Args:
            more: (K,) float64 on the CPU that the others get as well.

        Raises:
            NonFiniteLossError: A worker's loss became NaN or infinite since the last time.
        """
        self.note.operation = "agree"
        bad_step = self.counters.flush()
        status = Status(
            signalled=self.stop_flag.name is not None,
            bad_step=bad_step,
            counted=self.counters.rows(),
            lap_s=self.course.lap(),
            data_s=self.course.data_s,
            waited_s=self.profiler.close(self.course.state.step),
        )
        agreed = agree(status, self.group, self.division, more)
        if agreed.bad is not None:
            raise NonFiniteLossError(self.course.describe_bad(*agreed.bad, self.keeper.advice()))
        steps = self.course.take_in(agreed)
        if steps:
            spent = self.profiler.count(agreed, status, steps, self.course)
            lr, top = last_lr(self.course, self.parts.optimizers), self.counters.top
            self.console.advance(progress(self.course, agreed, steps, lr, spent, top=top))
        return agreed

    def snapshot(self, *, best: bool = False, must: bool = False) -> None:
        """See `Session.snapshot`."""
        self.before_collective("s.snapshot()")
        if self.batch is not None:
            self.sync.note_open_step()
        agreed = self.agree(self.keeper.own_statistics())
        self.note.operation = "snapshot"
        self.course.saved()
        rows = self.recorder.saved
        self.keeper.save(self.course.state, agreed, rows, best=best, must=must)
        self.stepper.pace.skip(self.course.state.step)

    @contextmanager
    def evaluation(self, *, save: bool = True) -> Iterator[None]:
        """Judge the models: evaluation mode, all workers' running statistics, no gradients.

        Args:
            save: Take a snapshot first where it will take long.
        """
        self.before_collective("s.evaluate(...)")
        if save and self.begun and self.course.expects_long_evaluation:
            self.snapshot(must=True)
        self.note.operation = "evaluate"
        if self.batch is not None:
            self.sync.note_open_step()
        model = self.parts.model
        with self.keeper.lent(), torch.no_grad(), evaluating(model):
            yield
        self.course.add_evaluation(agree_on_pause(self.course.lap(), self.stop_flag, self.group))
        self.profiler.evaluated(self.course.state)

    def time_evaluation(self, judge: Judge, loader: EvalLoader) -> None:
        """Time an evaluation by its first batches, where a time budget must leave room for it.

        Changes nothing that is trained, and counts as training time.
        """
        course, budget_s = self.course, self.course.budget_s
        if budget_s is None or course.state.eval_s is not None or not loader.num_samples:
            return
        self.note.operation = "evaluate"
        most_s = min(_TIMING_S, budget_s / 20)
        with torch.no_grad(), evaluating(self.parts.model):
            sample_s = time_batches(judge, loader.batches(), most_s)
        share = -(-loader.num_samples // self.group.world_size)
        found = torch.tensor([share * sample_s, course.lap()], dtype=torch.float64)
        rows = self.group.gather_rows(found)  # (world_size, 2)
        course.timed_eval_s = float(rows[:, 0].max())
        course.add_pause(float(rows[0, 1]))
        told = describe_too_long(course.closing_evals_s(), str(course.loop.time_budget), budget_s)
        if told is not None and self.group.rank == 0:
            self.console.warn(told)
        self.note.operation = "script"

    def note_validation(self, figures: Figures, samples: int) -> None:
        """Make figures the open epoch's validation result; others are logged as they are. Local."""
        if self.watcher is not None:
            self.watcher.evaluated(figures, samples)
        if self._epoch_is_open:
            self._validated = True
            self.logged |= self.course.take_validation(figures, samples)

    def _close_pass(self) -> None:
        """End a pass over the data, with the step that the script has left its loop in."""
        self._left = False
        if self.batch is not None:
            self.before_collective("break")
            self._count_step()
            self._do_what_is_due()
        if self._syncs_at_end:
            self.note.operation = "average"
            self.profiler.consensus(self.sync, self.course.state.step)

    def _open_step(self) -> None:
        step = self.course.state.step
        self._has_gradients = self.holds_pieces = False
        self._loss_before = None
        self._unstepped += 1
        self.note.begin(step + 1)
        self.random.at_step(step)
        if self.course.rate is not None:
            self.course.rate.apply(step)

    def _pieces(self, batch: Batch, most: int, source: Iterator[Batch]) -> Iterator[Batch]:
        """Go through this worker's shards, each cut to what fits into memory.

        Only the last piece's gradients are exchanged.
        """
        while True:
            self.sync.begin_step(self.course.state.step, batch)
            for piece in pieces(batch, most):
                self.batch, self._has_gradients = piece, False
                self.sync.begin_piece(piece)
                if self.meter is not None:
                    self.meter.begin()
                if self.watcher is not None:
                    self.watcher.batch(piece, self.course.state.epoch, self.course.state.step)
                yield piece
            if batch.last:
                return
            batch = next(source)

    def _count_step(self) -> None:
        if self.stepper.scaler is not None:
            self.stepper.end_update()
        batch, self.batch = self.batch, None
        if self._stand_in.mode is not None:
            self._stand_in.end()
        state = self.course.state
        if self.meter is not None:
            self.meter.count_step()
        state.step += 1
        state.step_in_epoch += 1
        if batch is not None:
            state.samples_seen += batch.total
            if not batch.last:  # the script left in the middle of a batch
                self.stepper.forget()
                self.sync.abandon_step()
        if self._syncs_after_step:
            self.profiler.after_step(self.sync, state.step)
        if self.guard is not None:
            self.guard.look(state.step)

    def _do_what_is_due(self) -> None:
        """Exchange news and save, where it is time for it."""
        course = self.course
        if course.state.step >= course.next_agreement:
            self.agree()
            self._heed_signal()
        if course.due_to_save():
            self.snapshot()

    def _heed_signal(self) -> None:
        if self.course.stopping == "signal":
            self.snapshot(must=True)
            self._epoch_is_open = False  # it stays as it was saved
            raise InterruptedTraining
