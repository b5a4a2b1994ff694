"""Puts the chosen way of combining gradients into a training."""

import torch
from torch import nn

from paceline.gradient_sync.compression import Compression
from paceline.gradient_sync.local_sgd.schedule import LocalTerms
from paceline.gradient_sync.options import LOCAL_METHODS
from paceline.gradient_sync.replica import Forward, Replica
from paceline.training.engine import Engine
from paceline.training.sync.auto import AutoSync
from paceline.training.sync.base import StepSync
from paceline.training.sync.local_sgd import make_local
from paceline.training.sync.powersgd import PowerSGDSync
from paceline.training.sync.validation import method_of, refuse_backend

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def replicated(engine: Engine, module: nn.Module, forward: Forward | None) -> Replica:
    """Have a module's gradients averaged over the workers. Collective.

    Args:
        engine: Of the training.
        module: Ready on its device.
        forward: What a forward pass computes, where not the module's own.
    """
    dtype = _HALF.get(method_of(engine.config))
    compression = None if dtype is None else Compression(dtype)
    if isinstance(engine.sync, AutoSync):
        compression = engine.sync.compression
    return Replica(module, engine.group, forward, compression)


def make_sync(engine: Engine) -> StepSync | None:
    """Make what a method needs beside the replicas; None where that is nothing. Collective.

    Raises:
        UsageError: The backend can't carry the method.
    """
    method = method_of(engine.config)
    refuse_backend(method, engine.group.backend)
    if method in LOCAL_METHODS:
        return make_local(engine, LocalTerms.of(engine.config.sync))
    if method == "auto" and engine.group.world_size > 1:
        return AutoSync(engine)
    return PowerSGDSync(engine) if method == "powersgd" else None
