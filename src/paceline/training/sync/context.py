"""What a `GradientSync` is made of, and the one that a training's options ask for."""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import final

import torch

from paceline.distributed.group import Group
from paceline.distributed.work_division import Division
from paceline.gradient_sync.registry import sync_methods
from paceline.gradient_sync.replica import Replica
from paceline.metrics.console import Console
from paceline.results.run_directory import RunDirectory
from paceline.training.components import Parts
from paceline.training.config import TrainConfig
from paceline.training.optimizer_step import Stepper
from paceline.training.profiling.profile_writer import Profiler
from paceline.training.progress import Course
from paceline.training.rng import RandomStreams
from paceline.training.sync.base import GradientSync
from paceline.training.sync.buffer_averaging import Statistics
from paceline.training.sync.validation import method_of, refuse_backend


@final
@dataclass(frozen=True, kw_only=True)
class SyncContext:
    """The training that gradients are combined in, on this worker."""

    config: TrainConfig
    """All options; those of `--sync` under `sync`."""
    group: Group
    """The workers, and their collectives."""
    division: Division
    """Which parts of a step each worker has."""
    parts: Parts
    """Models and optimizers; complete from `setup` on."""
    stepper: Stepper
    """Runs backward passes, and updates."""
    course: Course
    """Position, and the length of an epoch."""
    profiler: Profiler
    """Is told when another way begins, and measures."""
    statistics: Statistics
    """The models' running statistics, by part."""
    random: RandomStreams
    """This worker's generators."""
    run: RunDirectory
    console: Console
    """Says things to the user; on rank 0."""
    scaler: torch.amp.GradScaler | None
    """The loss scaler, with `--precision fp16`."""
    writes: bool
    """Whether this worker writes snapshots."""
    kept_options: tuple[str, ...] = ()
    """Options of an optimizer that hold as they are now, whatever a snapshot says."""
    replicas: list[Replica] = field(default_factory=list)
    """The models, as they have been taken in."""


def make_sync(context: SyncContext) -> GradientSync:
    """Make what the options ask for. Collective.

    Raises:
        UsageError: The backend can't carry it.
    """
    method = method_of(context.config)
    refuse_backend(method, context.group.backend)
    module, _, name = sync_methods()[method].implementation.partition(":")
    make: Callable[[SyncContext], GradientSync] = getattr(import_module(module), name)
    return make(context)
