"""Sets up a session from a recipe's job: model, loaders, optimizer and schedule."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from paceline.data.batch import as_pair
from paceline.data.protocols import Labelled
from paceline.optim.build import build_optimizer, takes_fused
from paceline.optim.schedule import build_schedule, scaled_lr
from paceline.training.batches.loader import EvalLoader, Loader
from paceline.training.batches.sources import describe_data
from paceline.training.evaluation.distributed_mean import average
from paceline.training.hooks.learning_rate import LearningRateSchedule
from paceline.training.job import Job, LossFunction
from paceline.training.losses import as_scores, build_loss
from paceline.training.session import Session


@final
@dataclass(kw_only=True)
class RecipeTraining:
    """A recipe's job on a worker, as the training loop uses it."""

    session: Session
    model: nn.Module
    loss: LossFunction
    """(outputs, targets) -> mean, with label smoothing."""
    plain_loss: LossFunction
    """Without it, for evaluation."""
    train: Loader
    validation: EvalLoader
    test: EvalLoader | None
    top: int
    """5 to also count classes among the five best guesses, 1 for the best alone, 0 for neither."""

    def evaluate_batch(self, content: object) -> Mapping[str, Tensor | float]:
        """Give a validation batch's figures."""
        inputs, targets = as_pair(content)
        return figures_of(as_scores(self.model(inputs)), targets, self.plain_loss, self.top)


def figures_of(
    outputs: Tensor, targets: Tensor, loss: LossFunction, top: int
) -> Mapping[str, Tensor]:
    """Give an evaluated batch's figures: the mean loss, and by sample what was guessed right."""
    figures = {"loss": loss(outputs, targets)}
    if top:
        right = outputs.topk(top, dim=1).indices == targets.unsqueeze(1)  # (N, top)
        figures["accuracy"] = right[:, 0]
    if top == 5:
        figures["top5_accuracy"] = right.any(1)
    return figures


def prepare(session: Session, job: Job) -> RecipeTraining:
    """Put a job on a session. Collective.

    Raises:
        UsageError: Options that this job, or this number of workers, can't have.
    """
    config, engine = session.config, session.engine
    # Model and data.
    if job.channels_last:
        job.model.to(memory_format=torch.channels_last)
        engine.context.components.channels_last = True
    model = session.model(job.model).train()
    train = session.loader(job.train, augment=job.augment)
    validation = session.eval_loader(job.validation, evaluate_with=job.evaluate_with)
    test = None
    if job.test is not None:
        test = session.eval_loader(job.test, evaluate_with=job.evaluate_with)
        engine.context.progress.test_samples = describe_data(job.test).num_samples()
    # Optimizer and learning rate, which take the size of an epoch.
    lr, _ = scaled_lr(config.optim, train.plan.global_batch)
    context = engine.context
    fused = takes_fused(config.optim, context.group.device, exact=context.division.is_fixed)
    optimizer = build_optimizer(config.optim, model.named_parameters(), lr, fused=fused)
    session.optimizer(optimizer)
    schedule = build_schedule(
        config.optim,
        total_steps=config.loop.epochs * train.plan.steps_per_epoch,
        steps_per_epoch=train.plan.steps_per_epoch,
    )
    rate = LearningRateSchedule(optimizer, [lr] * len(optimizer.param_groups), schedule)
    engine.context.progress.rate = rate
    engine.context.hooks.add(rate)
    # Figures and losses.
    top = count_top(job)
    engine.counters.top = top
    classes = number_of_classes(job)
    return RecipeTraining(
        session=session,
        model=model,
        loss=build_loss(job.loss, config.loop.label_smoothing, classes),
        plain_loss=build_loss(job.loss, 0.0, classes),
        train=train,
        validation=validation,
        test=test,
        top=top,
    )


def evaluate_best(t: RecipeTraining) -> dict[str, object]:
    """Evaluate the best model by validation on the job's test set. Collective.

    The model keeps these weights: call it when the training is over.

    Returns:
        For the summary: test_loss, test_accuracy and so on; nothing without a test set.
    """
    engine = t.session.engine
    if t.test is None or not engine.snapshots.load_best():
        return {}
    with engine.evaluation(save=False):
        batches = engine.validation.batches(t.test, "test")
        figures, samples = average(
            t.evaluate_batch, batches, engine.context.group, engine.context.division
        )
    return {"test_samples": samples} | {f"test_{name}": value for name, value in figures.items()}


def count_top(job: Job) -> int:
    """Choose what accuracy is counted: 5 also counts the five best guesses, 0 counts nothing."""
    classes = number_of_classes(job)
    if classes is None:
        return 0
    return 5 if classes > 5 else 1


def number_of_classes(job: Job) -> int | None:
    """Give the number of classes, None where the task isn't classification."""
    if job.num_classes is None and isinstance(job.train, Labelled):
        return len(job.train.class_names)
    return job.num_classes
