"""Evaluates the model of a finished or stopped run, in one process."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.format import read_snapshot
from paceline.checkpoint.store import SnapshotStore
from paceline.config.fields import OptionValue
from paceline.config.rundir import RunDirectory
from paceline.data.memory import TensorData
from paceline.dist.device import pick_device
from paceline.dist.environment import Placement
from paceline.dist.group import Group
from paceline.dist.options import DeviceKind, DistOptions
from paceline.metrics.counters import Totals
from paceline.trainer.job import Job
from paceline.trainer.keeper import load_weights
from paceline.trainer.past import PastRun
from paceline.trainer.recipe import load_recipe
from paceline.trainer.seeding import seed_everything
from paceline.trainer.setup import (
    make_evaluator,
    make_source,
    number_of_classes,
    wants_channels_last,
)

_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """How a snapshot's model does on the validation set."""

    snapshot: Path
    step: int
    totals: Totals
    confusion: Tensor
    """(classes, classes) int64, rows by true class; (0, 0) where the task has no classes."""
    class_names: tuple[str, ...]
    top: int
    """5 where the five best guesses were counted as well."""


def judge(
    run: RunDirectory,
    which: str,
    arguments: Mapping[str, OptionValue] | None = None,
    device_kind: DeviceKind = "auto",
) -> Judgement:
    """Evaluate a snapshot's model on the recipe's validation set, each sample once.

    Args:
        run: The run directory.
        which: `best`, `last`, or a snapshot's directory.
        arguments: The recipe's arguments that differ from the run's, such as `data_dir`.
        device_kind: Where to compute, whatever the run was trained on.

    Raises:
        UsageError: No such run, snapshot or argument.
        SnapshotError: The snapshot is damaged or doesn't fit the recipe.
        DataError: The data can't be read.
    """
    past = PastRun.read(run)
    config = past.config()
    path = SnapshotStore(run.snapshots, config.snapshots.keep_last).resolve(which)
    snapshot = read_snapshot(path)
    seed_everything(config.loop.seed)
    job = load_recipe(past.reference)(**{**past.arguments, **(arguments or {})})
    device = pick_device(DistOptions(device=device_kind), Placement())
    group = Group(Placement(), device, "none")
    layout = wants_channels_last(config.compute, job)
    if layout:
        job.model.to(memory_format=torch.channels_last)
    load_weights(job.model, snapshot.tensors.get("model", {}))
    source = make_source(job.validation, job, config, device, layout)
    evaluator = make_evaluator(job, config, device, _BATCH)
    classes = number_of_classes(job) or 0
    try:
        totals, confusion = evaluator.run(job.model.to(device), source, group, classes)
    finally:
        source.close()
    return Judgement(
        snapshot=path,
        step=snapshot.step,
        totals=totals,
        confusion=confusion,
        class_names=_class_names(job, classes),
        top=evaluator.top,
    )


def _class_names(job: Job, classes: int) -> tuple[str, ...]:
    if isinstance(job.validation, TensorData):
        named = job.validation.class_names
        return named + tuple(str(number) for number in range(len(named), classes))
    return tuple(str(number) for number in range(classes))
