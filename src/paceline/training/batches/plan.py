"""The plan of a training: steps per epoch and batch sizes of each worker. Pure functions."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.data.options import (
    DataOptions,
    check_shards,
    choose_global_batch,
    count_micro_batches,
)
from paceline.data.order import EpochPlan, steps_in_epoch
from paceline.distributed.work_division import Division
from paceline.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """Steps per epoch, and how each global batch is split over the workers."""

    division: Division
    """Which parts of a step each worker has: one, or several shards."""
    global_batch: int
    """Samples of one optimizer step over all workers together."""
    batch_per_worker: tuple[int, ...]
    """Samples of a full step by rank."""
    micro_batches: int
    """Passes through the model that a full step takes on the busiest worker."""
    train_samples: int
    drop_last: bool
    steps_per_epoch: int
    """0 for a stream."""
    shuffle: bool = True
    has_own_batches: bool = False
    """Whether the script makes the batches, of any sizes: `global_batch` is the first epoch's
    largest."""

    @property
    def mean_batch(self) -> float:
        """Samples of an optimizer step, on average over an epoch where the script makes them."""
        is_own = self.has_own_batches and self.steps_per_epoch
        return self.train_samples / self.steps_per_epoch if is_own else self.global_batch

    @property
    def micro_batch(self) -> int:
        """The most samples that a worker passes through the model at once."""
        largest = max(self.batch_per_worker)
        if self.division.is_fixed:
            largest = -(-self.global_batch // self.division.parts)
        return -(-largest // self.micro_batches)

    @property
    def most_at_once(self) -> int:
        """The most samples that are given to the script at once; larger shares come in pieces."""
        is_any = self.has_own_batches and self.micro_batches == 1  # later ones may be larger
        return sys.maxsize if is_any else self.micro_batch

    def epoch(self, seed: int, epoch: int, first_step: int, rank: int) -> EpochPlan:
        """Describe one worker's way through one epoch."""
        own_parts = self.division.parts_of(rank)
        return EpochPlan(
            seed=seed,
            epoch=epoch,
            global_batch=self.global_batch,
            first_step=first_step,
            part=own_parts.start,
            count=len(own_parts),
            parts=self.division.parts,
            drop_last=self.drop_last,
            shuffle=self.shuffle,
        )

    @property
    def shares(self) -> str:
        """Say how a full batch is shared, such as `32 + 32`."""
        return " + ".join(map(str, self.batch_per_worker))


def make_plan(
    options: DataOptions,
    division: Division,
    train_samples: int | None,
    *,
    shuffle: bool = True,
    batch_sizes: Sequence[int] = (),
) -> TrainPlan:
    """Cut a training set into steps and each step into the workers' batches.

    Args:
        options: The global batch, and whether a short one is left out.
        division: Which parts of a step each worker has.
        train_samples: Size of the training set; None for a stream, whose length nobody knows.
        shuffle: Whether each epoch has an order of its own.
        batch_sizes: Of the first epoch, where the script makes the batches itself.

    Raises:
        UsageError: The batch can't be shared by the workers, or no step would be left.
    """
    global_batch = choose_global_batch(options, division.world_size)
    if division.is_fixed:
        check_shards(division.parts, global_batch)
    # Sizes of the parts of a full batch, in the order of the parts.
    sizes = [stop - start for start, stop in division.cuts(global_batch)]
    ranks = range(division.world_size)
    # Steps of an epoch: 0 for a stream, whose length isn't known.
    steps = 0
    if batch_sizes:
        steps = len(batch_sizes)
        if options.drop_last:
            raise UsageError(
                "--drop-last has no effect on batches that a batch_sampler of the script makes: "
                "leave it out, or let the sampler leave the batch out"
            )
    elif train_samples is not None:
        steps = steps_in_epoch(train_samples, global_batch, options.drop_last)
    return TrainPlan(
        division=division,
        global_batch=global_batch,
        batch_per_worker=tuple(sum(sizes[part] for part in division.parts_of(r)) for r in ranks),
        micro_batches=count_micro_batches(max(sizes), options.max_batch_per_worker),
        train_samples=train_samples or 0,
        drop_last=options.drop_last,
        steps_per_epoch=steps,
        shuffle=shuffle,
        has_own_batches=bool(batch_sizes),
    )


def describe_oversized(plan: TrainPlan) -> str | None:
    """Say that a global batch is larger than the training set; None where it isn't, or unknown."""
    if not 0 < plan.train_samples < plan.global_batch:
        return None
    return (
        f"The global batch ({plan.global_batch:,}) is larger than the training set "
        f"({plan.train_samples:,} samples): an epoch is one step with all of them. Give a smaller "
        "--global-batch"
    )


def describe_unlike_shares(plans: Sequence[TrainPlan]) -> str | None:
    """Say that the workers have unlike shares of several loaders' batches; None where they don't.

    Args:
        plans: The first is that of the loader whose steps are counted.
    """
    for other in plans[1:]:
        first, pairs = plans[0], zip(plans[0].batch_per_worker, other.batch_per_worker, strict=True)
        if any(a * other.global_batch != b * first.global_batch for a, b in pairs):
            workers = first.division.world_size
            return (
                f"The batches of {first.global_batch:,} and of {other.global_batch:,} samples are "
                f"shared by {workers} workers as {first.shares} and as {other.shares}: the first "
                "says how much each worker's loss counts, and samples of the second count "
                f"unequally. Give both a batch size that {workers} divides"
            )
    return None


_SYNCED = "synchronised BatchNorm (--sync-batchnorm, nn.SyncBatchNorm)"


def check_plan(plan: TrainPlan, *, sync_batchnorm: bool, optimizers: int) -> None:
    """Check that all options can be combined with this plan.

    Args:
        sync_batchnorm: Whether a BatchNorm takes its statistics over all workers: by
            `--sync-batchnorm`, or PyTorch's own in the model.

    Raises:
        UsageError: Synchronised BatchNorm, or several optimizers, over batches cut into pieces; or
            synchronised BatchNorm where a worker may be without samples.
    """
    # Several optimizers: each update must come after all gradients of the batch.
    if optimizers > 1 and plan.micro_batches > 1:
        raise UsageError(
            "--max-batch-per-worker can't be combined with several optimizers: their gradients "
            "would be added up over the pieces of a batch before the first one updates"
        )
    if optimizers > 1 and plan.division.is_fixed:
        raise UsageError(
            "--shards can't be combined with several optimizers: the shards of a batch would see "
            "the weights before and after the first one's update"
        )
    # SyncBatchNorm: a collective in every forward pass, so all workers need samples in each.
    workers = plan.division.world_size
    if sync_batchnorm and plan.has_own_batches and workers > 1:
        raise UsageError(
            f"{_SYNCED} can't be combined with a batch_sampler of the script: a batch may have "
            "fewer samples than there are workers. Use GroupNorm, or a sampler and batch_size"
        )
    if sync_batchnorm and plan.division.is_fixed:
        raise UsageError(
            "--shards can't be combined with nn.SyncBatchNorm: its statistics would be those of as "
            "many shards as there are workers. Use nn.BatchNorm2d (each shard has statistics of "
            "its own), or GroupNorm"
        )
    if not sync_batchnorm or workers == 1:
        return
    if not plan.steps_per_epoch and not plan.drop_last:
        raise UsageError(
            f"{_SYNCED} on a stream needs --drop-last: its last batch may have fewer samples "
            "than there are workers"
        )
    if plan.micro_batches > 1:
        raise UsageError(
            f"{_SYNCED} can't be combined with --max-batch-per-worker: its statistics "
            "are those of the whole global batch, which has to pass through the model at once"
        )
    last = plan.train_samples % plan.global_batch
    if 0 < last < workers and not plan.drop_last:
        raise UsageError(
            f"the last batch of an epoch has {last} samples for {workers} workers; "
            f"with {_SYNCED} each needs one: use --drop-last or another --global-batch"
        )
