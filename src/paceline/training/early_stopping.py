"""What ends a training early, and which epoch was the best. Pure."""

from paceline.options.durations import format_duration
from paceline.training.options import LoopOptions
from paceline.training.snapshots.train_state import StopReason, TrainState


def note_validation(state: TrainState, options: LoopOptions) -> bool:
    """Take in an epoch's validation figures.

    Args:
        state: With this epoch's `val_loss` and `val_accuracy`, at its end or (out of time) in its
            middle; its best figures and runs of epochs are brought up to date.
        options: The target, and what makes a result better.

    Returns:
        Whether this epoch is the best so far.
    """
    better = _is_better(state, options)
    state.epochs_without_gain = 0 if better else state.epochs_without_gain + 1
    if better:
        state.best_val_accuracy = state.val_accuracy
        state.best_val_loss = state.val_loss
        state.best_epoch = state.epoch + (state.step_in_epoch > 0)  # counted from 1
    accuracy, target = state.val_accuracy, options.target_accuracy
    met = target is not None and accuracy is not None and accuracy >= target
    state.epochs_on_target = state.epochs_on_target + 1 if met else 0
    return better


def stop_reason(state: TrainState, options: LoopOptions) -> StopReason | None:
    """Tell after an epoch whether the training is over, and why."""
    if options.target_accuracy is not None and state.epochs_on_target >= options.patience:
        return "target"
    if options.early_stopping and state.epochs_without_gain >= options.early_stopping:
        return "patience"
    if state.epoch >= options.epochs:
        return "epochs"
    return None


def fit_total_steps(
    state: TrainState, *, most_steps: int, budget_s: float, reserve_s: float
) -> int:
    """Estimate the steps that a time budget allows, at the pace so far.

    Args:
        state: Its clock and steps give the pace, evaluations and snapshots included.
        most_steps: Steps of all epochs.
        budget_s: The whole time budget.
        reserve_s: Time kept back for the last evaluation and snapshot.
    """
    if state.step == 0 or state.elapsed_s <= 0:
        return most_steps
    left_s = budget_s - reserve_s - state.elapsed_s
    possible = state.step + int(left_s * state.step / state.elapsed_s)
    return max(state.step, min(most_steps, possible))


def expected_eval_s(state: TrainState, timed_s: float | None, eval_samples: int) -> float:
    """Estimate how long the next evaluation takes.

    Args:
        state: Says how long the last one took, and how fast training is.
        timed_s: What its first batches say, where they have been timed.
        eval_samples: Its samples: where nothing has been timed, one is taken to run no faster than
            training does.
    """
    if state.eval_s is not None:
        return state.eval_s
    if timed_s is not None:
        return timed_s
    images_per_s = state.samples_seen / state.train_s if state.train_s > 0 else 0.0
    return eval_samples / images_per_s if images_per_s else 0.0


def reserve_s(eval_s: float, *, budget_s: float) -> float:
    """Choose the time to keep back for the evaluations and the snapshot at the end.

    Args:
        eval_s: How long these evaluations are expected to take.
        budget_s: The whole time budget; half of it always goes to training.
    """
    return min(budget_s / 2, 1.25 * eval_s + 1.0)


def describe_too_long(eval_s: float, budget: str, budget_s: float) -> str | None:
    """Say before the training that its evaluations don't fit into its time budget.

    Args:
        eval_s: How long the evaluations at the end are expected to take.
        budget: As the user wrote it.
        budget_s: The same, in seconds.
    """
    if eval_s <= budget_s / 2:
        return None
    return (
        f"The evaluations at the end take about {format_duration(eval_s)} by their first batches, "
        f"more than half of the time budget of {budget}: it will end after about "
        f"{format_duration(budget_s / 2 + eval_s)}. Give a longer --time-budget, or fewer samples "
        "to evaluate on"
    )


def _is_better(state: TrainState, options: LoopOptions) -> bool:
    accuracy, best_accuracy = state.val_accuracy, state.best_val_accuracy
    loss, best_loss = state.val_loss, state.best_val_loss
    if loss is None:  # not finite, or a script gives the accuracy alone
        if accuracy is None or best_loss is not None or options.best_by == "val_loss":
            return False
        return best_accuracy is None or accuracy > best_accuracy
    lower_loss = best_loss is None or loss < best_loss
    if options.best_by == "val_loss" or accuracy is None:
        return lower_loss
    if best_accuracy is None or accuracy != best_accuracy:
        return best_accuracy is None or accuracy > best_accuracy
    return lower_loss
