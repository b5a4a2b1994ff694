"""A training's figures as they are shown and recorded."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch.optim import Optimizer

from paceline.metrics.console import Advance, Communication
from paceline.metrics.counters import Totals
from paceline.results.metrics_table import EpochRow
from paceline.training.progress import TrainingProgress
from paceline.training.snapshots.train_state import TrainState
from paceline.training.status_exchange import Agreement


def progress(
    course: TrainingProgress,
    agreed: Agreement,
    steps: int,
    lr: float,
    spent: Communication | None,
    *,
    top: int | None,
) -> Advance:
    """Say how far the training is.

    Args:
        course: After it has taken the exchange in.
        agreed: The last exchange.
        steps: Steps since the exchange before.
        lr: Learning rate of the last step.
        spent: What these steps spent on communication; None of a single worker.
        top: 5 or 1 where accuracy is counted.
    """
    state, plan = course.state, course.plan
    left = max(0, state.total_steps - state.step)
    return Advance(
        epoch=state.epoch + 1,
        epochs=course.loop.epochs,
        step=state.step_in_epoch,
        steps=course.steps_per_epoch,
        loss=agreed.totals.mean_loss,
        accuracy=agreed.totals.accuracy if top else None,
        images_per_s=steps * plan.global_batch / agreed.lap_s if plan else 0.0,
        lr=lr,
        eta_s=left * state.elapsed_s / max(1, state.step),
        spent=spent,
    )


def epoch_row(
    state: TrainState,
    trained: Totals,
    top: int,
    lr: float,
    logged: Mapping[str, float],
    spent: Communication | None,
) -> EpochRow:
    """Make an epoch's row, without validation.

    Args:
        state: At the end of the epoch.
        trained: The epoch's sums over all workers.
        top: 5 or 1 where accuracy was counted, else 0.
        lr: Learning rate of the last step.
        logged: Figures of the script's own.
        spent: What the steps spent on communication; None of a single worker.
    """
    seconds, steps = state.epoch_train_s, max(1, state.step_in_epoch)
    row = EpochRow(
        epoch=state.epoch + 1,
        step=state.step,
        time_s=state.elapsed_s,
        train_loss=state.train_loss,
        lr=lr,
        images_per_s=trained.samples / seconds if seconds > 0 else 0.0,
        batch_time_s=seconds / steps,
        data_time_s=state.epoch_data_s / steps,
        exposed_comm=spent.exposed if spent else None,
        waiting=spent.waiting if spent else None,
        wire_bytes_per_step=spent.wire_bytes if spent else None,
        extra=logged,
    )
    if top:
        row = replace(row, train_accuracy=trained.accuracy)
    return replace(row, train_top5_accuracy=trained.top5_accuracy) if top == 5 else row


def with_validation(row: EpochRow, state: TrainState) -> EpochRow:
    """Add the epoch's validation figures."""
    return replace(
        row,
        val_loss=state.val_loss,
        val_accuracy=state.val_accuracy,
        val_top5_accuracy=state.val_top5_accuracy,
    )


def last_lr(course: TrainingProgress, optimizers: Sequence[Optimizer]) -> float:
    """Give the last step's learning rate, by our schedule or as the script has set it."""
    if course.rate is not None:
        return course.rate.lr_at(course.state.step - 1)
    for optimizer in optimizers:
        return float(optimizer.param_groups[0]["lr"])
    return 0.0
