"""`--shards`: a worker goes through fixed shards of every batch, one after another.

What a shard computes depends on its number alone: its samples, random numbers and running
statistics. How the shards' gradients are summed depends on their number alone too. So the result
has the same bits whoever goes through which shard.
"""

from typing import final

from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.errors import UsageError
from paceline.gradient_sync.ordered.reduce import OrderedSum
from paceline.training.context import TrainingContext
from paceline.training.optimizer_step import describe_unused
from paceline.training.sync.base import GradientSync


@final
class OrderedSync(GradientSync):
    """Sums the shards' gradients along one tree, whoever goes through which shard.

    Of a step: 1. each shard is opened, gone through, and its gradient taken, one after another;
    2. with the worker's last backward pass all workers exchange sums; 3. `after_step` leaves the
    generators alike.
    """

    def __init__(self, context: TrainingContext) -> None:
        """Create the ordered sync.

        Args:
            context: Of the training; its models may grow until the first step.
        """
        self._context = context
        self._division = context.division
        self._own_parts = self._division.parts_of(context.group.rank)
        self._components = context.components
        self._random = context.random
        self._ordered = OrderedSum(context.group, self._division.parts)
        context.profiler.wire_bytes = lambda: self._ordered.wire_bytes
        self._parameters: dict[str, nn.Parameter] = {}
        self._step = 0
        self._is_open = False
        """Whether a shard of the step has been opened."""
        self._schedule: list[object] | None = None
        """Learning rates and positions of schedules in the step's first backward pass."""
        self._sizes: list[int] = []
        """Samples of each shard of the step."""
        self._part = -1
        """The shard that was opened last."""
        self._stands_in = False
        self._to_come = -1
        """Samples of the open shard that no backward pass has been about; -1 where none is open."""

    def begin_step(self, step: int, batch: Batch | None) -> None:
        """Make everything a shard's own before its first forward pass. Local to the worker.

        Raises:
            UsageError: The shard before isn't complete.
        """
        if batch is None:
            return
        if not self._is_open:
            self._begin(step, batch)
        if batch.part == self._part:
            return  # a further piece of it
        self._check_complete()
        self._part = batch.part
        self._to_come = self._sizes[batch.part]
        self._stands_in = self._to_come == 0
        if len(self._own_parts) > 1:
            self._components.per_part.enter(batch.part)
            self._context.buffer_averager.enter(batch.part)
        self._random.at_shard(step, batch.part)

    def _begin(self, step: int, batch: Batch) -> None:
        """Begin a step with the worker's first shard of it."""
        self._step, self._is_open = step, True
        if not self._sizes or sum(self._sizes) != batch.total:
            self._sizes = [stop - start for start, stop in self._division.cuts(batch.total)]
        self._part = self._to_come = -1
        self._schedule = None
        self._components.per_part.begin_step()
        self._parameters = self._parameters or self._components.named_parameters()
        self._ordered.begin_step(self._parameters)

    def backward(self, loss: Tensor, batch: Batch | None, *, more: bool = False) -> None:
        """Take a shard's gradient, and sum those of all in the order of the shards."""
        if batch is None:
            raise UsageError(
                "with --shards a step is about a batch of the training loader, within the loop "
                "over s.loader(...): only it knows its shard"
            )
        optimizer_step, completes = self._context.optimizer_step, batch.last and not more
        if completes:
            optimizer_step.step_profiler.begin(loss)
        self._before_backward(batch, more=more)
        optimizer_step.run_backward(loss, batch.local / batch.total, completes=False)
        unused = self._after_backward(batch, more=more)
        if completes:
            optimizer_step.step_profiler.end()
        if unused:
            optimizer_step.report(describe_unused("the models", unused))

    def _before_backward(self, batch: Batch, *, more: bool) -> None:
        """Say whether the coming backward pass completes the shard's gradient. Local.

        Args:
            batch: What it is about.
            more: Another backward pass about the same batch will follow.

        Raises:
            UsageError: The shard's gradient has been complete before, or the learning rate isn't
                that of the step's other shards.
        """
        if self._to_come < 0:
            raise UsageError(
                "a second backward pass about the same shard, whose gradient was complete: with "
                "--shards add the losses up, or announce the passes that follow: "
                "s.backward(first, more=True), then s.backward(second) or s.step(second)"
            )
        complete = not more and batch.local == self._to_come
        # Not where the step's only pass here is all that there is to compare.
        if not complete or len(self._own_parts) > 1 or self._schedule is not None:
            self._check_schedule()
        if not self._stands_in:
            self._ordered.open_shard(batch.part, last=complete)

    def _after_backward(self, batch: Batch, *, more: bool) -> tuple[str, ...]:
        """Take a shard's gradient; after the worker's last shard put the sum in its place.

        Collective where the batch is the worker's last of the step, and no pass will follow.

        Returns:
            Once: names of parameters that get no gradient.
        """
        if more:
            return ()
        # A shard may come in several pieces: it is complete once its last one has come.
        self._to_come -= batch.local
        if self._to_come == 0:
            self._to_come = -1
            if self._stands_in:
                self._components.drop_gradients()
            else:
                self._ordered.close_shard()
        if not batch.last:
            return ()
        # Shards without samples in this step count as zeros.
        for part in self._own_parts:
            if not self._sizes[part]:
                self._ordered.skip(part)
        return self._ordered.finish()

    def after_step(self, step: int) -> None:
        """Leave the generators alike on all workers. Local to the worker.

        Raises:
            UsageError: The last shard isn't complete.
        """
        self._is_open = False
        self._check_complete()
        self._components.per_part.end_step()
        self._random.at_shard(self._step, self._division.parts)

    def close(self) -> None:
        """Take hooks off the parameters."""
        self._ordered.release()

    def _check_schedule(self) -> None:
        """Refuse other learning rates than the step's first shard had.

        A script may set them before each of its batches, where they come out the same.
        """
        now = self._components.schedule_state()
        if self._schedule is None:
            self._schedule = now
        elif now != self._schedule:
            raise UsageError(
                "the learning rate was changed between two shards of a step, and would be once for "
                "each of a worker's shards. Step the schedule where the weights have been updated: "
                "if s.step(loss): scheduler.step(). s.backward(loss) gives True in the same places"
            )

    def _check_complete(self) -> None:
        if self._to_come >= 0:
            self._to_come = -1
            raise UsageError(
                "a batch had no s.step(loss): with --shards every shard belongs to the sum of its "
                "step, so that none can be left out. Give it a share of zero: s.step(0 * loss)"
            )
