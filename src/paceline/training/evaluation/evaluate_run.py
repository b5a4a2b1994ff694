"""Evaluates the model of a finished or stopped run, in one process."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.format import read_snapshot
from paceline.checkpoint.store import SnapshotStore
from paceline.data.protocols import Labelled
from paceline.distributed.device import pick_device
from paceline.distributed.group import Group
from paceline.distributed.options import DeviceKind, DistOptions
from paceline.distributed.placement import Placement
from paceline.metrics.counters import Totals
from paceline.options.fields import OptionValue
from paceline.results.run_directory import RunDirectory
from paceline.training.batches.sources import describe_data, make_source
from paceline.training.components import autocast, takes_channels_last
from paceline.training.evaluation.evaluator import Evaluator
from paceline.training.job import Job
from paceline.training.losses import build_loss
from paceline.training.recipe import load_recipe
from paceline.training.recipe_session import count_top, number_of_classes
from paceline.training.rng import seed_everything
from paceline.training.run_record.previous_run import PreviousRun
from paceline.training.snapshots.model_weights import evaluated_weights, load_weights

_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Loss and accuracies of a snapshot's model on the validation set."""

    snapshot: Path
    step: int
    totals: Totals
    confusion: Tensor
    """(classes, classes) int64, rows by true class; (0, 0) where the task has no classes."""
    class_names: tuple[str, ...]
    top: int
    """5 where the five best guesses were counted as well."""


def find_snapshot(run: RunDirectory, which: str, say: Callable[[str], None]) -> Path:
    """Find the snapshot that a user asks for; where none is marked as the best, the last one.

    Args:
        which: `best`, `last`, or a snapshot's directory.
        say: Called where the last one stands in.

    Raises:
        UsageError: There is none.
    """
    store = SnapshotStore(run.snapshots, keep_last=2)
    if which == "best" and store.best() is None and store.steps():
        say("No snapshot is marked as the best one by validation: the last one is taken")
        which = "last"
    return store.resolve(which if which in ("best", "last") else str(Path(which).expanduser()))


def is_best_snapshot(run: RunDirectory, snapshot: Path) -> bool:
    """Tell whether a snapshot is the one that is marked as the best by validation."""
    best = SnapshotStore(run.snapshots, keep_last=2).best()
    return best is not None and best.name == snapshot.name


def evaluate_run(
    run: RunDirectory,
    path: Path,
    arguments: Mapping[str, OptionValue] | None = None,
    device_kind: DeviceKind = "auto",
    *,
    ema: bool = True,
) -> EvaluationResult:
    """Evaluate a snapshot's model on the recipe's validation set, each sample once.

    Args:
        arguments: The recipe's arguments that differ from the run's, such as `data_dir`.
        device_kind: Where to compute, whatever the run was trained on.
        ema: Judge the moving average of the weights where the snapshot has one.

    Raises:
        UsageError: No such run or argument.
        SnapshotError: The snapshot is damaged or doesn't fit the recipe.
        DataError: The data can't be read.
    """
    # The job as the run had it, on this process alone.
    past = PreviousRun.read_recipe(run)
    config = past.config()
    snapshot = read_snapshot(path)
    seed_everything(config.loop.seed)
    job = load_recipe(past.reference)(**{**past.arguments, **(arguments or {})})
    device = pick_device(DistOptions(device=device_kind), Placement())
    group = Group(Placement(), device, "none")
    # Memory format as in training; then the snapshot's weights.
    layout = takes_channels_last(job.model, config.compute)
    if layout:
        job.model.to(memory_format=torch.channels_last)
    of_model = snapshot.tensors.get("model", {})
    load_weights(job.model, evaluated_weights(snapshot.tensors) if ema else of_model)
    # Every validation sample once, with the loss as it is without label smoothing.
    source = make_source(
        describe_data(job.validation), config, group, layout, evaluate_with=job.evaluate_with
    )
    evaluator = Evaluator(
        loss=build_loss(job.loss, label_smoothing=0.0),
        forward_context=autocast(config.compute.precision, device),
        top=count_top(job),
        batch_size=config.data.max_batch_per_worker or _BATCH,
    )
    classes = number_of_classes(job) or 0
    try:
        totals, confusion = evaluator.run(job.model.to(device), source, group, classes)
    finally:
        source.close()
    return EvaluationResult(
        snapshot=path,
        step=snapshot.step,
        totals=totals,
        confusion=confusion,
        class_names=_class_names(job, classes),
        top=evaluator.top,
    )


def _class_names(job: Job, classes: int) -> tuple[str, ...]:
    if isinstance(job.validation, Labelled):
        named = job.validation.class_names
        return named + tuple(str(number) for number in range(len(named), classes))
    return tuple(str(number) for number in range(classes))
