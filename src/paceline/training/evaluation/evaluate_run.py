"""Evaluates the model of a finished or stopped run, in one process."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.checkpoint.format import read_snapshot
from paceline.checkpoint.store import SnapshotStore
from paceline.data.batch import BatchSource, as_pair
from paceline.data.protocols import Labelled
from paceline.distributed.device import pick_device
from paceline.distributed.group import Group
from paceline.distributed.options import DeviceKind, DistOptions
from paceline.distributed.placement import Placement
from paceline.distributed.work_division import Division
from paceline.errors import JobError
from paceline.options.fields import OptionValue
from paceline.results.run_directory import RunDirectory
from paceline.training.batches.sources import describe_data, make_source
from paceline.training.components import autocast
from paceline.training.evaluation.distributed_mean import Metrics, average
from paceline.training.evaluation.validation import eval_mode
from paceline.training.job import Job, LossFunction
from paceline.training.losses import as_scores, build_loss
from paceline.training.recipe import load_recipe
from paceline.training.recipe_session import count_top, figures_of, number_of_classes
from paceline.training.rng import seed_everything
from paceline.training.run_record.previous_run import PreviousRun
from paceline.training.snapshots.model_weights import evaluated_weights, load_weights

_BATCH = 256


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Loss and accuracies of a snapshot's model on the validation set."""

    snapshot: Path
    step: int
    figures: Metrics
    """Means over all samples: `loss`, `accuracy`, `top5_accuracy`, as far as they are counted."""
    samples: int
    confusion: Tensor
    """(classes, classes) int64, rows by true class; (0, 0) where the task has no classes."""
    class_names: tuple[str, ...]


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
    if job.channels_last:
        job.model.to(memory_format=torch.channels_last)
    of_model = snapshot.tensors.get("model", {})
    load_weights(job.model, evaluated_weights(snapshot.tensors) if ema else of_model)
    # Every validation sample once, with the loss as it is without label smoothing.
    source = make_source(
        describe_data(job.validation),
        config,
        group,
        job.channels_last,
        evaluate_with=job.evaluate_with,
    )
    classes = number_of_classes(job) or 0
    try:
        figures, samples, confusion = evaluate_model(
            job.model.to(device),
            source,
            group,
            loss=build_loss(job.loss, label_smoothing=0.0),
            forward_context=autocast(config.compute.precision, device),
            top=count_top(job),
            num_classes=classes,
            batch_size=config.data.max_batch_per_worker or _BATCH,
        )
    finally:
        source.close()
    return EvaluationResult(
        snapshot=path,
        step=snapshot.step,
        figures=figures,
        samples=samples,
        confusion=confusion,
        class_names=_class_names(job, classes),
    )


def evaluate_model(
    model: nn.Module,
    source: BatchSource,
    group: Group,
    *,
    loss: LossFunction,
    forward_context: Callable[[], AbstractContextManager[object]],
    top: int,
    num_classes: int,
    batch_size: int,
) -> tuple[Metrics, int, Tensor]:
    """Evaluate a model on this one worker, as a training does on all.

    Args:
        top: 5 to also count classes among the five best guesses, 1 for the best alone, 0 for none.
        num_classes: Above 0, to count a confusion matrix.

    Returns:
        The figures, the number of samples, and (num_classes, num_classes) int64 counts, rows by
        true class.
    """
    confusion = torch.zeros(num_classes**2, dtype=torch.int64, device=group.device)

    def judge(content: object) -> Mapping[str, Tensor | float]:
        """Give a batch's figures, and count its cells of the confusion matrix."""
        inputs, targets = as_pair(content)
        with forward_context():
            outputs = as_scores(model(inputs))
        if num_classes:
            _check_width(outputs, num_classes)
            cells = targets * num_classes + outputs.argmax(1)
            confusion.add_(torch.bincount(cells, minlength=len(confusion)))
        return figures_of(outputs, targets, loss, top)

    with torch.no_grad(), eval_mode(model):
        batches = source.eval_batches(0, 1, batch_size)
        figures, samples = average(judge, batches, group, Division.of(None, 1))
    if source.num_samples not in (0, samples):
        raise RuntimeError(f"evaluated {samples} of {source.num_samples} samples")
    return figures, samples, confusion.view(num_classes, num_classes).cpu()


def _check_width(outputs: Tensor, num_classes: int) -> None:
    if outputs.ndim != 2 or outputs.shape[1] != num_classes:
        raise JobError(
            f"the model gives outputs of shape {tuple(outputs.shape)} for {num_classes} classes; a "
            "confusion matrix needs (samples, classes): set the job's num_classes"
        )


def _class_names(job: Job, classes: int) -> tuple[str, ...]:
    if isinstance(job.validation, Labelled):
        named = job.validation.class_names
        return named + tuple(str(number) for number in range(len(named), classes))
    return tuple(str(number) for number in range(classes))
