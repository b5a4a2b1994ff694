"""What `--shards` can't be combined with: the result would depend on it. Imports no torch."""

from paceline.distributed.options import DistOptions
from paceline.errors import UsageError
from paceline.training.config import TrainConfig

EVERY = 100
"""Steps between two comparisons of the workers' weights in reproducible mode, by default."""
_WITHOUT_ALL_TO_ALL = ("mpi", "smddp")


def check_reproducible(config: TrainConfig, world_size: int) -> None:
    """Refuse options with which the same bits can't be promised. Pure.

    Args:
        config: The options.
        world_size: Number of workers.

    Raises:
        UsageError: One of them is given together with `--shards`, or there are too many workers.
    """
    shards = config.data.shards
    if shards is None:
        if config.compute.allow_different_hardware:
            raise UsageError(
                "--allow-different-hardware goes with --shards: without it nothing is compared"
            )
        return
    if world_size > shards:
        raise UsageError(
            f"{world_size} workers are more than --shards {shards}: each needs one at least. "
            f"Use at most {shards} workers; the number of shards belongs to the training"
        )
    if config.compute.sync_batchnorm:
        raise UsageError(
            "--shards can't be combined with --sync-batchnorm: its statistics need all shards of a "
            "batch at once, and a worker goes through its shards one after another. Leave it out "
            "(each shard has statistics of its own), or use a model with GroupNorm"
        )
    if config.loop.time_budget is not None:
        raise UsageError(
            "--shards can't be combined with --time-budget: the schedule would follow the clock, "
            "and with it the result. Give --epochs (--time-budget none where a recipe sets one)"
        )
    _check_backend(config.dist)


def check_every(config: TrainConfig) -> int:
    """Give the steps between two comparisons of the workers' weights; 0 for never."""
    if config.loop.check_every is not None:
        return config.loop.check_every
    return 0 if config.data.shards is None else EVERY


def _check_backend(options: DistOptions) -> None:
    if options.backend in _WITHOUT_ALL_TO_ALL:
        raise UsageError(
            f"--shards needs all-to-all, which --backend {options.backend} doesn't have. Use "
            "--backend nccl or gloo"
        )
