"""Position, clock and best results of a training: what a snapshot's JSON holds."""

import math
from dataclasses import dataclass, fields
from typing import Literal, Self

from paceline.errors import SnapshotError

StopReason = Literal["epochs", "target", "patience", "time", "signal", "script"]


@dataclass(kw_only=True)
class TrainState:
    """Position, clock and best results of a training; the same on every worker.

    It has a field for each name under `position` in a snapshot, which are these many.

    Positions are counted in steps and samples of the whole training, never by worker, so that any
    number of workers can resume from them. A field that is added here needs nothing else.
    """

    epoch: int = 0
    """Complete epochs."""
    step: int = 0
    """Optimizer steps since the start of the training."""
    step_in_epoch: int = 0
    samples_seen: int = 0
    train_samples: int = 0
    """Size of the training set that the position is counted in."""
    global_batch: int = 0
    """Samples of a full step, likewise."""
    elapsed_s: float = 0.0
    """Training time, evaluation and snapshots included, interruptions not."""
    train_s: float = 0.0
    """The part of `elapsed_s` that was spent on steps."""
    epoch_train_s: float = 0.0
    """The part of `train_s` that belongs to the current epoch."""
    epoch_data_s: float = 0.0
    """The part of `epoch_train_s` that the slowest worker waited for data."""
    total_steps: int = 0
    """Steps that the schedule is fitted to."""
    train_loss: float | None = None
    val_loss: float | None = None
    val_accuracy: float | None = None
    val_top5_accuracy: float | None = None
    best_val_accuracy: float | None = None
    best_val_loss: float | None = None
    best_epoch: int | None = None
    eval_s: float | None = None
    """How long the last evaluation took."""
    epochs_on_target: int = 0
    """Epochs in a row that met the target accuracy."""
    epochs_without_gain: int = 0
    """Epochs in a row without a better validation result."""
    ended: StopReason | None = None
    """Why the training is over; None while it can go on."""

    def to_json(self) -> dict[str, object]:
        """Give the fields as JSON."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, content: object) -> Self:
        """Read what `to_json` gave.

        Raises:
            SnapshotError: Fields are missing, or there are more than this version knows.
        """
        names = {field.name for field in fields(cls)}
        if not isinstance(content, dict) or (missing := names - content.keys()):
            lacking = ", ".join(sorted(missing)) if isinstance(content, dict) else "position"
            raise SnapshotError(
                "the snapshot's state.json doesn't say where the training stands: it has no "
                f"{lacking}"
            )
        if unknown := content.keys() - names:
            raise SnapshotError(
                f"the snapshot has {', '.join(sorted(unknown))}, which this version of Paceline "
                "doesn't know: resume with the version that wrote it, or a newer one"
            )
        return cls(**content)


def finite(value: float | None) -> float | None:
    """Turn what isn't a result (no samples, an overflow in evaluation) into None."""
    return value if value is not None and math.isfinite(value) else None
