"""Options of the data: how large a batch is, how it is read. Imports no torch."""

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.options.fields import check_at_least
from paceline.options.figures import plural

_MAX_LOADERS = 1000
DEFAULT_GLOBAL_BATCH = 64
"""The global batch of a recipe that names none."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """How samples become batches; the global batch is the contract, not the number of workers."""

    global_batch: int | None = None
    """Samples that one optimizer step sees, over all workers together: not a worker's share. The
    default is the recipe's own."""

    batch_per_worker: int | None = None
    """Samples of each worker in a step; the global batch is then this times the number of workers.
    When both are given they must agree."""

    max_batch_per_worker: int | None = None
    """Most samples that a worker puts through the model at once (what fits into its memory). A
    larger share of the global batch is cut into micro-batches whose gradients are added up."""

    shards: int | None = None
    """Reproducible mode: cut each global batch into this many fixed shards and sum their gradients
    in a fixed order. The result then has the same bits on any number of workers up to this one.
    Default: one share per worker, summed as the backend does."""

    drop_last: bool = False
    """Leave out the short batch at the end of an epoch. By default it is used, weighted exactly."""

    loader_workers: int = 2
    """Processes per worker that read and transform training samples, and as many for validation
    (0: none). Data sets kept in memory need and use none."""

    def __post_init__(self) -> None:
        check_at_least(self, global_batch=1, batch_per_worker=1, max_batch_per_worker=1, shards=1)
        if self.shards is not None:
            self._check_shards(self.shards)
        if not 0 <= self.loader_workers <= _MAX_LOADERS:
            raise UsageError(
                f"--loader-workers is {self.loader_workers}: it must be 0 or more, at most "
                f"{_MAX_LOADERS:,}"
            )

    def _check_shards(self, shards: int) -> None:
        if self.batch_per_worker is not None:
            raise UsageError(
                "--shards needs --global-batch: with --batch-per-worker the batch, and with it the "
                "result, would follow the number of workers"
            )
        if self.global_batch is not None:
            check_shards(shards, self.global_batch)


def check_shards(shards: int, global_batch: int) -> None:
    """Refuse shards without a sample.

    Raises:
        UsageError: There are more of them than samples in a batch.
    """
    if global_batch < shards:
        raise UsageError(
            f"{shards} shards are more than the {plural(global_batch, 'sample')} of a global "
            "batch: "
            "use fewer shards, or a larger --global-batch"
        )


def choose_global_batch(options: DataOptions, world_size: int) -> int:
    """Settle the global batch; `DEFAULT_GLOBAL_BATCH` where nobody says a size.

    Raises:
        UsageError: The two sizes disagree, or there are more workers than samples in a batch.
    """
    global_batch = options.global_batch
    if options.batch_per_worker is not None:
        # Both may be given where they agree.
        product = options.batch_per_worker * world_size
        if global_batch is not None and global_batch != product:
            raise UsageError(
                f"--global-batch {global_batch} and --batch-per-worker {options.batch_per_worker} "
                f"disagree: {world_size} workers make {product}. Give one of them"
            )
        global_batch = product
    if global_batch is None:
        global_batch = DEFAULT_GLOBAL_BATCH
    if global_batch < world_size:
        raise UsageError(
            f"{world_size} workers are more than the {plural(global_batch, 'sample')} of a global "
            f"batch: use at most {plural(global_batch, 'worker')}, or a global batch of at least "
            f"{world_size}"
        )
    return global_batch


def count_micro_batches(share: int, max_batch: int | None) -> int:
    """Count the pieces into which a worker's share of a batch is cut to fit its memory.

    Args:
        share: Most samples that any worker has in a step.
        max_batch: Most samples at once; None means that everything fits.
    """
    return 1 if max_batch is None else -(-share // max_batch)
