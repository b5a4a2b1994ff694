"""Differentiable all-gather of rows, for losses that compare samples of the global batch.

Every worker computes the same loss, over all samples.
"""

import zlib
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Function

from paceline.distributed.group import Group
from paceline.errors import JobError, UsageError
from paceline.training.batches.loader import EvalLoader
from paceline.training.context import TrainingContext

_CALL = "s.gather(...)"


def gathered(tensor: Tensor, context: TrainingContext) -> Tensor:
    """Put the workers' rows into one tensor, through which gradients pass. Collective.

    Args:
        tensor: (N, ...), a row or a fixed number of rows for each sample of this worker.

    Returns:
        (M, ...), the rows of all workers in the order of the batch.

    Raises:
        UsageError: A worker doesn't have its samples at once.
        JobError: The workers' rows have different shapes or types.
    """
    plan, group, batch = context.progress.plan, context.group, context.step.batch
    if context.division.is_fixed:
        raise UsageError(
            f"{_CALL} can't be combined with --shards: a worker has its shards one after another, "
            "so that no loss can see all samples of a batch. Leave one of the two out"
        )
    if plan is not None and plan.micro_batches > 1:
        raise UsageError(
            f"{_CALL} can't be combined with --max-batch-per-worker: a batch that passes the model "
            "in pieces is never there at once. Leave one of the two out"
        )
    if any(isinstance(each, EvalLoader) and each.is_running for each in context.components.loaders):
        raise UsageError(
            f"{_CALL} about a batch to evaluate on: workers may have unequal numbers of these. Let "
            "the evaluation judge each sample by itself"
        )
    context.step.gathered = context.place
    if group.world_size == 1:
        return tensor
    if batch is None:
        return _Gathered.apply(tensor, group, float(group.world_size))  # type: ignore[no-any-return]  # untyped in torch
    # What stands in for a worker's samples is none of the batch.
    rows = tensor if batch.local else tensor[:0]
    factor = batch.total / batch.local if batch.local else 0.0
    return _Gathered.apply(rows, group, factor)  # type: ignore[no-any-return]  # likewise


@final
class _Gathered(Function):
    """All-gather of rows; its backward pass gives each worker the gradient of its own rows.

    All of them compute the same loss, so that nothing has to be exchanged for it. This worker's
    gradients will count by its part b of the B samples: they are multiplied by B / b here.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: Group, factor: float) -> Tensor:  # torch's own type
        """Gather all rows: (own, ...) to (of all workers, ...). Collective."""
        kind = f"{own.dtype} {tuple(own.shape[1:])}"
        headers = group.gather_rows(torch.tensor([len(own), zlib.crc32(kind.encode())]))
        if not (headers[:, 1] == headers[0, 1]).all():
            raise JobError(
                f"{_CALL}: the workers' rows have unlike shapes or types, {kind} on rank "
                f"{group.rank}: pad the rows of all workers to one length"
            )
        sizes = headers[:, 0].tolist()
        start = sum(sizes[: group.rank])
        ctx.factor, ctx.start, ctx.stop = factor, start, start + len(own)
        padded = own.new_zeros(max(sizes), *own.shape[1:])
        padded[: len(own)] = own
        rows = group.gather_rows(padded.flatten()).view(group.world_size, *padded.shape)
        return torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0][ctx.start : ctx.stop] * ctx.factor, None, None
