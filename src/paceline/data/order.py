"""Which samples a worker sees at a step: a pure function of (seed, epoch, step, part).

The global order of an epoch doesn't know how many workers there are; a worker takes its
contiguous share of every global batch. Nothing is padded, nothing is lost.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from paceline.data.splitmix import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, Domain, derive_key
from paceline.distributed.work_division import share
from paceline.errors import UsageError

ORDER_VERSION = 1
"""Changes whenever `epoch_order` would give another order for the same arguments."""

Indices = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The steps of one epoch for one or several parts, from any step on."""

    seed: int
    epoch: int
    global_batch: int
    first_step: int = 0
    """Step within the epoch at which to begin; earlier samples are not read."""
    part: int = 0
    """The first part that is gone through: this worker's, or its first shard; 0 … parts-1."""
    parts: int = 1
    """Parts that every global batch is cut into."""
    count: int = 1
    """How many parts are gone through, one after another."""
    drop_last: bool = False
    shuffle: bool = True
    """False leaves the samples in their own order, in every epoch."""

    def __post_init__(self) -> None:
        if self.global_batch < 1 or self.epoch < 0 or self.first_step < 0:
            raise ValueError(
                f"global_batch must be positive, epoch and first_step not negative: {self}"
            )
        _check_part(self.part, self.parts)
        _check_part(self.part + self.count - 1, self.parts)


@dataclass(slots=True)
class StepShare:
    """The samples of one part at one step, as a run of positions in the epoch's order.

    Not frozen: one is made every step.
    """

    start: int
    stop: int
    """`order[start:stop]` are this part's samples; empty where the batch has none for it."""
    batch_start: int
    """Where the global batch begins: its first sample stands in for an empty share."""
    total: int
    """Samples in the global batch."""
    part: int = 0
    """Which part, where several are gone through."""
    last: bool = True
    """Whether no other part follows in this step."""

    @property
    def to_read(self) -> tuple[int, int]:
        """Positions to compute on: the share, or the batch's first sample instead of an empty one.

        Collectives need a backward pass of every worker, also of those without samples.
        """
        if self.start == self.stop:
            return self.batch_start, self.batch_start + 1
        return self.start, self.stop


def epoch_order(num_samples: int, seed: int, epoch: int) -> Indices:
    """Shuffle the samples of one epoch: sort their indices by a splitmix64 key each.

    The keys of different samples differ (the hash is a bijection), so that the order doesn't
    depend on the sorting algorithm.

    Args:
        epoch: 0 for the first.

    Returns:
        int64 array of shape (num_samples,), a permutation.
    """
    positions = np.arange(1, num_samples + 1, dtype=np.uint64)
    # The outputs of splitmix64 (Steele, Lea and Flood, 2014) seeded with the key, modulo 2**64.
    keys = positions * np.uint64(GOLDEN) + np.uint64(derive_key(Domain.ORDER, seed, epoch))
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(MULTIPLIER_1)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(MULTIPLIER_2)
    return np.argsort(keys ^ (keys >> np.uint64(31))).astype(np.int64, copy=False)


def plan_order(plan: EpochPlan, num_samples: int) -> Indices:
    """Give the order of a plan's epoch, of all workers together: (num_samples,)."""
    if plan.shuffle:
        return epoch_order(num_samples, plan.seed, plan.epoch)
    return np.arange(num_samples, dtype=np.int64)


def steps_in_epoch(num_samples: int, global_batch: int, drop_last: bool) -> int:
    """Count the optimizer steps of an epoch.

    Raises:
        UsageError: There would be none.
    """
    full, rest = divmod(num_samples, global_batch)
    steps = full if drop_last else full + (rest > 0)
    if steps == 0:
        raise UsageError(
            f"an epoch of {num_samples} samples has no step with --global-batch {global_batch}"
            + (" and --drop-last: use a smaller batch, or keep the last one" if num_samples else "")
        )
    return steps


def step_share(
    num_samples: int, step_in_epoch: int, global_batch: int, part: int, parts: int
) -> StepShare:
    """Find one part's run of positions at one step."""
    batch_start = step_in_epoch * global_batch
    total = max(0, min(global_batch, num_samples - batch_start))
    begin, end = share(total, part, parts)
    return StepShare(batch_start + begin, batch_start + end, batch_start, total, part)


def plan_shares(plan: EpochPlan, num_samples: int) -> Iterator[StepShare]:
    """List what is gone through in an epoch, step by step from `plan.first_step` on.

    Of several parts those without samples (in a short batch) are left out, but for the first where
    all are: a step always has something.

    Raises:
        UsageError: The epoch has no steps.
    """
    steps = steps_in_epoch(num_samples, plan.global_batch, plan.drop_last)
    if plan.count > 1:
        for step in range(plan.first_step, steps):
            yield from step_shares(plan, num_samples, step)
        return
    for step in range(plan.first_step, steps):
        yield step_share(num_samples, step, plan.global_batch, plan.part, plan.parts)


def step_shares(plan: EpochPlan, num_samples: int, step: int) -> list[StepShare]:
    """List the parts of one step that have samples; the first alone where none has any."""
    start = step * plan.global_batch
    return batch_shares(plan, start, max(0, min(plan.global_batch, num_samples - start)))


def batch_shares(plan: EpochPlan, start: int, total: int) -> list[StepShare]:
    """List the same of a batch that begins at a place and has a number of samples of its own."""
    listed = []
    for part in range(plan.part, plan.part + plan.count):
        begin, end = share(total, part, plan.parts)
        listed.append(StepShare(start + begin, start + end, start, total, part, last=False))
    kept = [step_share for step_share in listed if step_share.start < step_share.stop] or listed[:1]
    kept[-1].last = True
    return kept


def own_shares(plan: EpochPlan, bounds: Indices) -> Iterator[StepShare]:
    """List what is gone through in an epoch whose batches have sizes of their own.

    Args:
        plan: From its `first_step` on.
        bounds: (steps + 1,): where each batch begins, and the last one's end.
    """
    for start, stop in itertools.pairwise(bounds[plan.first_step :].tolist()):
        yield from batch_shares(plan, start, stop - start)


def _check_part(part: int, parts: int) -> None:
    if not 0 <= part < parts:
        raise ValueError(f"part {part} is none of {parts} parts (they count from 0)")
