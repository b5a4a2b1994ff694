"""The engine under the session: steps, status exchanges, epochs, snapshots."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from threading import get_ident
from time import perf_counter
from typing import final

from torch import Tensor
from torch.optim import Optimizer

from paceline.data.batch import Batch, pieces
from paceline.errors import InterruptedTraining, NonFiniteLossError, UsageError
from paceline.files import storing
from paceline.gradient_sync.buffers import stand_in_mode
from paceline.launch.errors.error_records import end_process
from paceline.launch.heartbeat import DEVICE_WAIT, StepNote
from paceline.metrics.counters import StepCounters
from paceline.training.batches.loader import Loader
from paceline.training.batches.loop_checks import (
    COUNTED_FROM_ZERO,
    DONE_TWICE,
    ELSEWHERE,
    WITHOUT_STEP,
    counts_from,
    refuse_beside_training,
    refuse_between_shards,
    refuse_eval_batch,
    refuse_pass,
    remark_alone,
)
from paceline.training.components import UNKNOWN_SCHEDULER
from paceline.training.context import CountedBy, OpenEpoch, OpenStep, StepCounter, TrainingContext
from paceline.training.evaluation.distributed_mean import Metrics
from paceline.training.evaluation.validation import Validation
from paceline.training.hooks.metrics_logger import epoch_row, last_lr
from paceline.training.loss_weights import LossWeights, check_loss
from paceline.training.optimizer_step import UNUSED_GRADIENTS, refuse_in_backward
from paceline.training.options import LoopOptions
from paceline.training.snapshots.manager import SnapshotManager
from paceline.training.status_exchange import (
    NOTHING,
    Agreement,
    Status,
    StopFlag,
    agree,
)
from paceline.training.sync.base import GradientSync
from paceline.training.weight_average import WeightAverage

_MAX_ACCUMULATED = 64
"""Steps without an update that may be about gradients for the next one. Beyond, nothing waits."""


@final
@dataclass(kw_only=True)
class Engine:
    """Runs a worker's training. All methods are collective unless they say otherwise."""

    context: TrainingContext
    sync: GradientSync
    """Combines the workers' gradients."""
    losses: LossWeights
    """Runs backward passes through it, of losses by their weights."""
    counters: StepCounters
    snapshots: SnapshotManager
    stop_flag: StopFlag
    note: StepNote
    announce: "Callable[[Engine], None]"
    """Called once the position is known: tells the user what begins."""
    begun: bool = False
    thread: int = 0
    """The one in which it has begun."""
    first_step: int = 0
    """Steps of the training that were done when it began here."""
    figures: Metrics = field(default_factory=dict)
    """Of the script's own, in the last epoch that was recorded here."""
    step: OpenStep
    """The context's."""
    validation: Validation
    counting: StepCounter = field(default_factory=StepCounter)
    """Decides when a step is complete."""

    @property
    def epoch(self) -> OpenEpoch:
        """The state of the current epoch."""
        return self.context.epoch

    def set_epochs(self, count: int) -> None:
        """Settle how long to train. Local to the worker."""
        self._settle(replace(self.context.config.loop, epochs=count))

    def set_ema(self, decay: float) -> None:
        """Settle that there is a moving average of the weights. Local to the worker.

        Raises:
            UsageError: The decay is out of range.
        """
        self._settle(replace(self.context.config.loop, ema=decay))

    def _settle(self, loop: LoopOptions) -> None:
        context = self.context
        context.progress.loop, context.config = loop, replace(context.config, loop=loop)

    def before_collective(self, call: str) -> None:
        """End a pass that was left; refuse what all do together between two shards of a step."""
        if self.epoch.left:
            self._close_pass()
        if self.context.division.is_fixed:
            refuse_between_shards(self.step.batch, call)

    def release(self) -> None:
        """End all reader processes, and give the models their own forward pass back. Local."""
        self.sync.close()
        for replica in self.context.replicas:
            replica.release()
        self.context.optimizer_step.release()
        for loader in self.context.components.loaders:
            loader.close()

    def begin(self) -> None:
        """Restore the newest snapshot, if there is one, and start the clock."""
        context, components, progress = self.context, self.context.components, self.context.progress
        self.begun, self.thread = True, get_ident()
        self.note.operation = "restore"
        # Where the training stands: at its first step, or where the snapshot was taken.
        progress.begin()
        if (decay := context.config.loop.ema) is not None:
            components.average = WeightAverage(components.model, decay)
            context.hooks.after_step.append(components.average.after_step)
        context.buffer_averager.reset()  # the models may have been changed since they came in
        components.per_part.begin(context.division.parts_of(context.group.rank))
        with storing(context.run.path):
            restored = self.snapshots.restore_newest()
        if restored is not None:
            progress.resume(restored)
        self.first_step, self.step.updated = progress.state.step, progress.state.step - 1
        # What takes part in the steps goes on from there.
        self.sync.setup(progress.state.step)
        for setup in context.hooks.setup:
            setup(components, progress.state, self.snapshots.restored)
        reload = self.snapshots.take_reload()
        if restored is not None and restored.step_in_epoch and progress.plan is not None:
            components.note_resumed(reload)
        self.announce(self)
        progress.lap()
        self.note.operation, self.note.has_begun = "script", True

    @property
    def has_an_epochs_end_alone(self) -> bool:
        """Whether it was resumed behind an epoch's last batch, and that epoch hasn't ended yet."""
        state, plan = self.context.progress.state, self.context.progress.plan
        is_behind = plan is not None and 0 < plan.steps_per_epoch <= state.step_in_epoch
        return is_behind and state.step == self.first_step

    def epochs(self) -> Iterator[int]:
        """Go through the epochs that are left."""
        progress = self.context.progress
        while progress.can_continue:
            self.context.random.at_epoch(progress.state.epoch)
            self.context.optimizer_step.collect_zero_grads()
            self.epoch.is_open, self.epoch.passed = True, False
            yield progress.state.epoch
            self.close_epoch()

    def close_epoch(self) -> None:
        """Record the epoch, judge whether to go on, and save; nothing where none is open."""
        context, epoch, progress = self.context, self.epoch, self.context.progress
        state, has_epochs = progress.state, self.counting.by == "batches"
        if not epoch.is_open:
            return
        epoch.is_open, context.components.behind_batches = False, None
        if not has_epochs and not state.step:
            return  # a script that trained nothing
        self._close_pass()
        self.note.operation = "epoch end"
        context.optimizer_step.report_without_update(state.step - 1 - self.step.updated)
        if has_epochs and progress.plan and not state.step_in_epoch:
            context.optimizer_step.report_once(WITHOUT_STEP)
        # The epoch's figures, over all workers.
        trained = epoch.trained or self.agree().totals
        state.train_loss = trained.mean_loss if trained.samples else None
        row = epoch_row(context, trained, self.counters.top or 0, sized=has_epochs)
        # What follows from them: the next epoch, or the end.
        close = progress.close_epoch if has_epochs else progress.close_loop
        best = close(validated=epoch.validated)
        self.figures = dict(epoch.logged)
        for end_epoch in context.hooks.end_epoch:
            end_epoch(row)
        if state.step_in_epoch == 0:
            self.counters.reset()
        context.epoch = OpenEpoch()
        with context.profiler.recording(progress):
            self._save(best=best, must=True)
        if progress.stopping == "signal" and state.ended is None:
            raise InterruptedTraining

    def free_steps(self, count: int) -> Iterator[int]:
        """Go through the steps that are left of a loop without a training loader."""
        self._begin_free("turns")
        progress = self.context.progress
        progress.state.total_steps = progress.state.total_steps or count
        while progress.can_continue and progress.state.step < count:
            self._open_free_step()
            yield progress.state.step
            self._count_step()
            self._do_what_is_due()

    def begin_free(self) -> None:
        """Count the steps of the script's own loop by its updates."""
        self._begin_free("updates")
        self._open_free_step()

    def _begin_free(self, by: CountedBy) -> None:
        self.counting = StepCounter(by, self.context.components.optimizers)
        self.context.optimizer_step.collect_zero_grads()
        self.epoch.is_open = True

    def steps(self, loader: Loader) -> Iterator[Batch]:
        """Give the batches of what is left of the epoch; after each, do what is due.

        Raises:
            UsageError: Not within `epochs`, or for a second time in one epoch.
        """
        context, epoch, progress = self.context, self.epoch, self.context.progress
        self._begin_pass()
        state, step_profiler = progress.state, context.optimizer_step.step_profiler
        number, own_parts = state.epoch, context.division.parts_of(context.group.rank)
        note, step, begin_steps = self.note, self.step, context.hooks.begin_step
        step_profiler.begin_pass(state.step)
        source = step_profiler.timed(loader.read(number, state.step_in_epoch))
        most = loader.plan.most_at_once
        whole = most if len(own_parts) == 1 else -1  # else given in pieces
        try:
            while progress.stopping is None or (self._accumulates and progress.postpones_stop()):
                # Fetch the next batch.
                note.operation = "data"
                if state.step >= step_profiler.next_sample:
                    step_profiler.sample(state.step)
                waiting_since_s = perf_counter()
                batch = next(source, None)
                progress.data_s += perf_counter() - waiting_since_s
                if batch is None:
                    progress.has_seen_all = True
                    break
                if step_profiler.is_sampling:
                    step_profiler.mark("batch")
                # The script's forward and backward passes, and its update.
                self._open_step(by_shard=context.division.is_fixed)
                if batch.local and batch.local <= whole:
                    step.batch = batch
                    for begin_step in begin_steps:
                        begin_step(state.step, batch)
                    yield batch
                else:
                    yield from self._pieces(batch, most, source)
                self._count_step()
                # Exchange the status, log, save.
                if state.step >= progress.next_agreement or progress.due_to_save():
                    self._do_what_is_due()
            epoch.trained = self.agree().totals
            epoch.lr = last_lr(context)
            self._stop_on_signal()
            self._read_ahead(loader)
            self._end_batches()
        except GeneratorExit:  # the script leaves its loop early
            self._leave_batches(number)
            raise
        note.operation = "script"

    def _end_batches(self) -> None:
        """End a pass that has come to its end; the script's loop is still in it."""
        self._close_pass()
        self.context.components.note_end_of_batches(writes=self.context.writes)
        if self.context.components.makes_schedulers():
            self.context.optimizer_step.report_once(UNKNOWN_SCHEDULER)

    def _leave_batches(self, number: int) -> None:
        self.note.operation = "script"
        self.epoch.left = self.epoch.is_open and self.context.progress.state.epoch == number
        if self.epoch.left:  # else an old pass is dropped in a later epoch
            self.context.components.note_end_of_batches(writes=self.context.writes)

    def _begin_pass(self) -> None:
        context, epoch = self.context, self.epoch
        if self.begun and get_ident() != self.thread:  # which may wait for batches from here
            end_process(UsageError(ELSEWHERE), context.group.rank, context.run.logs)
        refuse_pass(is_open=epoch.is_open and self.counting.by == "batches", passed=epoch.passed)
        epoch.passed, epoch.left = True, False
        place = context.progress.state.step_in_epoch
        has_batches = context.components.resumed and not self.has_an_epochs_end_alone
        if has_batches and counts_from() in {0, 1} - {place}:
            context.optimizer_step.report_once(COUNTED_FROM_ZERO.format(place=place))
        if undone := context.components.put_back():
            context.optimizer_step.report_once(DONE_TWICE.format(names=", ".join(undone)))

    def backward(
        self,
        loss: Tensor,
        outputs: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        more: bool = False,
        weight: Tensor | float | None = None,
    ) -> bool:
        """Run a backward pass, and count its loss; tell whether the gradients are complete."""
        context, step = self.context, self.step
        batch = step.batch
        try:
            if batch is None:
                return self._backward_alone(loss, weight, more=more)
            # Gradients are complete with the last backward pass of the last piece (`batch.last`).
            if weight is None and self.losses.is_plain:
                self.sync.backward(loss, batch, more=more)
            else:
                loss = self.losses.backward(loss, batch, weight, more=more)
        except (AttributeError, RuntimeError, TypeError) as error:
            check_loss(loss, error)
            raise
        context.optimizer_step.holds_pieces = not batch.last
        # Losses of several passes over one batch (`more`) count as one: their sum.
        if step.loss_before is not None:
            loss, step.loss_before = step.loss_before + loss.detach(), None
        if more:
            step.loss_before = loss.detach()
            return False
        number = context.progress.state.step
        if number != step.counted and batch.local:
            self.counters.add(loss, batch.local, number, outputs, targets, batch.part)
        if not batch.last:
            return False
        step.counted = number
        return True

    def check_eval_batch(self) -> None:
        """Refuse a batch to evaluate on in a step that has had no loss yet. Local."""
        step, number = self.step, self.context.progress.state.step
        is_used = step.counted == number or step.loss_before is not None
        refuse_beside_training(step.batch, is_used=is_used, shards=self.context.config.data.shards)

    def _backward_alone(self, loss: Tensor, weight: Tensor | float | None, *, more: bool) -> bool:
        """Run a backward pass that isn't about a batch of the training loader."""
        context = self.context
        refuse_eval_batch(context.components.loaders)
        counts_by = self.counting.by if self.begun else None
        knows_loader = context.components.train_loader is not None
        is_behind, skipped = context.progress.has_seen_all, self.step.skipped
        if remark := remark_alone(counts_by, knows_loader, is_behind, skipped):
            context.optimizer_step.report_once(remark)
        if self.counting.take_due():
            self._do_what_is_due()
        loss = self.losses.backward(loss, None, weight, more=more)
        number = context.progress.state.step
        if self.counting.by != "batches" and number != self.step.counted:
            self.step.counted = number
            part = context.division.parts_of(context.group.rank).start
            self.counters.add(loss, 1, number, part=part)
        return not more

    def update(self, optimizer: Optimizer | None = None, *, zero_grads: bool = True) -> None:
        """Take the optimizers' step. Local to the worker, but where a snapshot is due."""
        context, step = self.context, self.step
        batch = step.batch
        if batch is not None and not batch.last:
            return
        step.updated = context.progress.state.step
        optimizers = context.components.optimizers if optimizer is None else (optimizer,)
        context.optimizer_step.update(optimizers, zero_grads=zero_grads)
        if batch is None and self.counting.is_over_with(optimizers):
            self._count_step()
            self._open_free_step()

    def leave_gradients(self) -> None:
        """Leave complete gradients to the script, in their true size. Local to the worker."""
        components, optimizer_step = self.context.components, self.context.optimizer_step
        optimizer_step.unscale(components.optimizers)
        optimizer_step.watch_others(components.lacks, self._note_update)

    def _note_update(self) -> None:
        """Note that an optimizer of the script's has used the open batch's gradients. Local."""
        if self.step.batch is not None:
            self.step.updated = self.context.progress.state.step

    def update_by_script(self, optimizer: Optimizer) -> None:
        """Do what an optimizer's own `step()` asks for, where `s.backward` has come before it.

        Raises:
            UsageError: It hasn't.
        """
        refuse_in_backward(optimizer)
        if not self.context.optimizer_step.has_gradients:
            self.context.optimizer_step.refuse_a_step_of_its_own()
        self.update(optimizer, zero_grads=False)

    def agree(self, more: Callable[[], Tensor] | None = None) -> Agreement:
        """Count, and learn what the other workers know.

        Args:
            more: Fetches (K,) float64 to the CPU that the others get as well.

        Raises:
            NonFiniteLossError: A worker's loss became NaN or infinite since the last time.
        """
        context, progress = self.context, self.context.progress
        # What is fetched is waited for: with a GPU until all steps so far are done.
        batch_waits = context.optimizer_step.step_profiler.batch_waits
        self.note.operation = "agree" if batch_waits is None else DEVICE_WAIT
        status = Status(
            signalled=self.stop_flag.name is not None,
            bad_step=self.counters.flush(),
            counted=self.counters.rows(),
            lap_s=progress.lap(),
            data_s=progress.data_s if batch_waits is None else batch_waits.take_s(),
            waited_s=context.profiler.step_profiler.close(),
            step_s=progress.step_s,
            step=progress.state.step,
            skipped=self.step.skipped,
        )
        own = NOTHING if more is None else more()
        if batch_waits is not None:
            self.note.operation = "agree"
        agreed = agree(status, context.group, context.division, own)
        if agreed.bad is not None:
            raise NonFiniteLossError(progress.describe_bad(*agreed.bad, self.snapshots.advice()))
        steps = progress.advance(agreed)
        spent = context.profiler.count(agreed, status, steps, progress) if steps else None
        for after_exchange in context.hooks.after_exchange:
            after_exchange(agreed, steps, spent, self.counters.top)
        return agreed

    def snapshot(self, *, best: bool = False, must: bool = False) -> None:
        """Save everything needed to resume exactly, in the background; an open step ends first."""
        progress = self.context.progress
        self.before_collective("s.snapshot()")
        # Weights are ahead of what is counted; or gradients, which no snapshot has, wait for more.
        if self.context.has_updated or self._accumulates:
            progress.save_after_step(best=best)
        else:
            self._save(best=best, must=must)

    def _save(self, *, best: bool, must: bool) -> None:
        progress = self.context.progress
        best = best or progress.saves_best
        agreed = self.agree(self.context.buffer_averager.own)
        self.note.operation = "snapshot"
        progress.saved()
        self.snapshots.save(progress.state, agreed, best=best, must=must)
        self.context.optimizer_step.step_profiler.skip(progress.state.step)

    @contextmanager
    def evaluation(self, *, save: bool = True) -> Iterator[None]:
        """Put the models into evaluation mode, after what is due before an evaluation.

        Args:
            save: Take a snapshot: first where it will take long, else where a signal ends it.
        """
        self.before_collective("s.evaluate(...)")
        saves = save and self.begun
        # Behind the loop over batches nothing follows that a snapshot could wait for.
        keep = self._save if self.step.batch is None else self.snapshot
        if early := saves and self.context.progress.expects_long_evaluation:
            keep(best=False, must=True)
        last = (lambda: keep(best=False, must=True)) if saves and not early else None
        with self.validation.models_evaluated(last):
            yield

    def _read_ahead(self, loader: Loader) -> None:
        """Start reading the next epoch, if there is one, while this one is evaluated and saved."""
        progress = self.context.progress
        following = progress.state.epoch + 1
        if progress.stopping is None and following < progress.loop.epochs:
            loader.read_ahead(following)

    def _close_pass(self) -> None:
        """End a pass over the data, with the step that the script has left its loop in."""
        self.epoch.left = False
        if self.step.batch is not None and self._is_untouched:
            step = self.step
            step.batch = None  # as where the loop had been shorter
            # Opening its step has forgotten what the batches before have left.
            self.context.optimizer_step.has_gradients = step.counted > step.updated
            for replica in self.context.replicas:
                replica.syncing = True
        elif self.step.batch is not None:
            self.before_collective("break")
            self._count_step()
            self._do_what_is_due()

    @property
    def _is_untouched(self) -> bool:
        """Whether nothing has been trained with the open batch; the same on all workers."""
        optimizer_step, step = self.context.optimizer_step, self.step
        is_trained = optimizer_step.has_gradients or optimizer_step.holds_pieces
        is_trained |= step.loss_before is not None
        return not is_trained and not self.context.has_updated

    def _open_step(self, *, by_shard: bool = False) -> None:
        """Open a step; one that is gone through by shards gets its random numbers with each."""
        context = self.context
        optimizer_step = context.optimizer_step
        number = context.progress.state.step
        optimizer_step.has_gradients = optimizer_step.holds_pieces = False
        self.step.loss_before = None
        self.note.begin(number + 1)
        if not by_shard:
            context.random.at_step(number)

    def _open_free_step(self) -> None:
        """Open a step that has no batch of the training loader."""
        self._open_step()
        for begin_step in self.context.hooks.begin_step:
            begin_step(self.context.progress.state.step, None)

    def _pieces(self, batch: Batch, most: int, source: Iterator[Batch]) -> Iterator[Batch]:
        """Go through this worker's shards, each cut to what fits into memory.

        Only the last piece's gradients are exchanged. A worker without a sample of the step lets
        the model run without effect: no buffer learns of it, and its gradient weighs zero.
        """
        context, number = self.context, self.context.progress.state.step
        with nullcontext() if batch.local else stand_in_mode(context.components.models.values()):
            while True:
                for piece in pieces(batch, most):
                    self.step.batch, context.optimizer_step.has_gradients = piece, False
                    for replica in context.replicas:
                        replica.syncing = piece.last
                    for begin_step in context.hooks.begin_step:
                        begin_step(number, piece)
                    yield piece
                if batch.last:
                    return
                batch = next(source)

    def _count_step(self) -> None:
        context, step = self.context, self.step
        state = context.progress.state
        batch, step.batch = step.batch, None
        state.step += 1
        state.step_in_epoch += 1
        context.progress.ends_s.append(perf_counter())
        if self.stop_flag.name is not None and context.group.world_size == 1:
            context.progress.next_agreement = state.step  # there is no one to agree with
        if batch is not None:
            state.samples_seen += batch.total
            if step.counted < state.step - 1:
                step.skipped += 1
            if not batch.last:  # the script left in the middle of a batch
                context.optimizer_step.holds_pieces = False
                context.optimizer_step.zero_grad()
                for replica in context.replicas:
                    replica.reset()
        for after_step in context.hooks.after_step:
            after_step(state.step)

    @property
    def _accumulates(self) -> bool:
        """Whether the last steps may have left gradients for the next update; the same on all."""
        since = self.context.progress.state.step - 1 - self.step.updated
        is_near = self.counting.by == "batches" and 0 < since <= _MAX_ACCUMULATED
        return is_near and bool(self.context.components.optimizers)

    def _do_what_is_due(self) -> None:
        """Exchange the status and save, where it is time for it."""
        progress = self.context.progress
        if progress.state.step >= progress.next_agreement:
            self.agree()
            self._stop_on_signal()
        if progress.saves_next or progress.due_to_save():
            self.snapshot(must=progress.saves_next)

    def _stop_on_signal(self) -> None:
        progress = self.context.progress
        if progress.stopping != "signal":
            return
        if self._accumulates and progress.postpones_stop():
            progress.next_agreement = progress.state.step  # after the next step again
        else:
            if self._accumulates:
                self.context.optimizer_step.report_once(UNUSED_GRADIENTS)
            self._save(best=False, must=True)
            self.epoch.is_open = False  # it stays as it was saved
            raise InterruptedTraining
