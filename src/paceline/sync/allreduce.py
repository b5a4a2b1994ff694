"""The gradients of all workers summed by all-reduce: DistributedDataParallel, set up well."""

import inspect
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def replicate(model: nn.Module, world_size: int, device: torch.device) -> nn.Module:
    """Wrap a model so that its backward pass averages gradients over all workers. Collective.

    Buffers (BatchNorm's running statistics) stay each worker's own while training; the trainer
    averages them where the model is used. Broadcasting them before every forward pass, DDP's
    default, would keep rank 0's alone and cost one more blocking collective a step.

    Args:
        model: On `device`, the same parameters on every worker (rank 0's are broadcast).
        world_size: With 1 the model is returned as it is.
        device: This worker's device.
    """
    if world_size == 1:
        return model
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    # `broadcast_buffers` became `forward_sync_buffers` in torch 2.13.
    buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **{buffers: False},  # type: ignore[arg-type]  # its name depends on torch's version
    )


def without_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Keep this backward pass's gradients local (all but the last micro-batch of a step)."""
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return nullcontext()
