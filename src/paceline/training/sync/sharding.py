"""Reproducible mode: a worker goes through fixed shards of every batch, one after another.

What a shard computes depends on its number alone: its samples, random numbers and running
statistics. How the shards' gradients are summed depends on their number alone too. So the result
has the same bits whoever goes through which shard.
"""

from typing import final

from torch import nn

from paceline.data.batch import Batch
from paceline.distributed.group import Group
from paceline.distributed.work_division import Division
from paceline.errors import UsageError
from paceline.gradient_sync.ordered.reduce import OrderedSum
from paceline.training.components import Parts
from paceline.training.rng import RandomStreams
from paceline.training.sync.buffer_averaging import Statistics


@final
class Sharding:
    """One worker's way through its shards."""

    def __init__(
        self,
        division: Division,
        group: Group,
        parts: Parts,
        statistics: Statistics,
        random: RandomStreams,
    ) -> None:
        """Args:
        division: Which shards each worker has.
        group: The workers.
        parts: The models; may grow until the first step.
        statistics: Of the models, by shard.
        random: This worker's generators.
        """
        self._division = division
        self._mine = division.parts_of(group.rank)
        self._parts = parts
        self._statistics = statistics
        self._random = random
        self._ordered = OrderedSum(group, division.parts)
        self._parameters: dict[str, nn.Parameter] = {}
        self._step = 0
        self._schedule: list[object] | None = None
        """Learning rates and positions of schedules in the step's first backward pass."""
        self._filled: list[int] = []
        self._stands_in = False
        self._to_come = -1
        """Samples of the open shard that no backward pass has been about; -1 where none is open."""

    def begin_step(self, step: int, batch: Batch) -> None:
        """Begin a step with its first batch. Local to the worker."""
        self._step = step
        cuts = list(self._division.cuts(batch.total))
        self._filled = [part for part in self._mine if cuts[part][0] < cuts[part][1]]
        self._to_come = -1
        self._schedule = None
        self._parts.per_part.begin_step()
        self._parameters = self._parameters or self._parts.named_parameters()
        self._ordered.begin_step(self._parameters)

    def open(self, batch: Batch) -> None:
        """Make everything a shard's own before its first forward pass. Local to the worker.

        Raises:
            UsageError: The shard before isn't complete.
        """
        self._check_complete()
        self._parts.per_part.enter(batch.part)
        self._to_come = batch.local
        self._stands_in = batch.local == 0
        self._statistics.enter(batch.part)
        self._random.at_shard(self._step, batch.part)

    def before_backward(self, batch: Batch, *, more: bool) -> None:
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
        self._check_schedule()
        if not self._stands_in:
            complete = not more and batch.local == self._to_come
            self._ordered.open_shard(batch.part, last=complete)

    def after_backward(self, batch: Batch, *, more: bool) -> tuple[str, ...]:
        """Take a shard's gradient; after the worker's last shard put the sum in its place.

        Collective where the batch is the worker's last of the step, and no pass will follow.

        Returns:
            Once: names of parameters that get no gradient.
        """
        if more:
            return ()
        self._to_come -= batch.local
        if self._to_come == 0:
            self._to_come = -1
            if self._stands_in:
                self._parts.drop_gradients()
            else:
                self._ordered.close_shard()
        if not batch.last:
            return ()
        for part in self._mine:
            if part not in self._filled:
                self._ordered.skip(part)
        return self._ordered.finish()

    def end_step(self) -> None:
        """Leave the generators alike on all workers. Local to the worker.

        Raises:
            UsageError: The last shard isn't complete.
        """
        self._check_complete()
        self._parts.per_part.end_step()
        self._random.at_shard(self._step, self._division.parts)

    def refuse_within(self, batch: Batch | None, call: str) -> None:
        """Refuse what all workers do together while one of them may be between two shards. Local.

        Args:
            batch: The one that the script has, if any.
            call: What it wants, for the message.

        Raises:
            UsageError: The script is within a step.
        """
        if batch is not None and not batch.last:
            raise UsageError(
                f"{call} between two shards of a step: with --shards the workers have unequal "
                "numbers of batches, and meet where the weights have been updated: "
                f"if s.step(loss): {call}. Count steps there too, rather than batches"
            )

    @property
    def wire_bytes(self) -> float:
        """What this worker sends in a step, in bytes; 0 before the first one."""
        return self._ordered.wire_bytes

    def release(self) -> None:
        """Take hooks off the parameters. Local to the worker."""
        self._ordered.release()

    def _check_schedule(self) -> None:
        """Refuse other learning rates than the step's first shard had.

        A script may set them before each of its batches, where they come out the same.
        """
        now = self._parts.schedule_state()
        if self._schedule is None:
            self._schedule = now
        elif now != self._schedule:
            raise UsageError(
                "the learning rate was changed between two shards of a step, and would be once for "
                "each of a worker's shards. Step the schedule where the weights have been updated: "
                "if s.step(loss): scheduler.step()"
            )

    def _check_complete(self) -> None:
        if self._to_come >= 0:
            self._to_come = -1
            raise UsageError(
                "a batch had no s.step(loss): with --shards every shard belongs to the sum of its "
                "step, so that none can be left out. Give it a share of zero: s.step(0 * loss)"
            )
