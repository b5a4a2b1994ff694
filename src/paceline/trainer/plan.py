"""What follows from the options, the number of workers and the size of the training set. Pure."""

from dataclasses import dataclass

from paceline.data.options import (
    DEFAULT_GLOBAL_BATCH,
    DataOptions,
    choose_global_batch,
    count_micro_batches,
)
from paceline.data.order import EpochPlan, share, steps_in_epoch


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """How a training's steps are cut."""

    world_size: int
    global_batch: int
    """Samples of one optimizer step over all workers together."""
    batch_per_worker: tuple[int, ...]
    """Samples of a full step by rank."""
    micro_batches: int
    """Passes through the model that a full step takes on the busiest worker."""
    train_samples: int
    drop_last: bool
    steps_per_epoch: int

    @property
    def micro_batch(self) -> int:
        """The most samples that a worker passes through the model at once."""
        return -(-max(self.batch_per_worker) // self.micro_batches)

    def epoch(self, seed: int, epoch: int, first_step: int, rank: int) -> EpochPlan:
        """Describe one worker's way through one epoch."""
        return EpochPlan(
            seed=seed,
            epoch=epoch,
            global_batch=self.global_batch,
            first_step=first_step,
            part=rank,
            parts=self.world_size,
            drop_last=self.drop_last,
        )

    def samples_after(self, step_in_epoch: int) -> int:
        """Count the samples that all workers have seen after so many steps of an epoch."""
        return min(step_in_epoch * self.global_batch, self.train_samples)


def make_plan(options: DataOptions, world_size: int, train_samples: int) -> TrainPlan:
    """Cut a training set into steps and each step into the workers' batches.

    Raises:
        UsageError: The batch can't be shared by the workers, or no step would be left.
    """
    global_batch = choose_global_batch(options, DEFAULT_GLOBAL_BATCH, world_size)
    bounds = (share(global_batch, rank, world_size) for rank in range(world_size))
    batches = tuple(stop - start for start, stop in bounds)
    return TrainPlan(
        world_size=world_size,
        global_batch=global_batch,
        batch_per_worker=batches,
        micro_batches=count_micro_batches(max(batches), options.max_batch_per_worker),
        train_samples=train_samples,
        drop_last=options.drop_last,
        steps_per_epoch=steps_in_epoch(train_samples, global_batch, options.drop_last),
    )
