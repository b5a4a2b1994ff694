"""An epoch's figures, and where they go: metrics.csv, TensorBoard, the console.

Rank 0 alone writes.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import final

from torch.optim import Optimizer

from paceline.files import storing
from paceline.metrics.console import Advance, Communication, Console
from paceline.metrics.counters import Totals
from paceline.metrics.tensorboard import TensorBoardLog
from paceline.options.figures import plural
from paceline.results.metrics_table import (
    Begun,
    Cells,
    EpochRow,
    append_rows,
    cells_of,
    start_table,
)
from paceline.training.components import Components
from paceline.training.hooks.base import StepHook
from paceline.training.progress import TrainingProgress
from paceline.training.snapshots.train_state import TrainState
from paceline.training.status_exchange import Agreement

_SAVED_ROWS = 1000
"""Rows that a snapshot holds: some 200 kB."""


@final
class MetricsLogger(StepHook):
    """Records epochs; on ranks other than 0 it shows and writes nothing."""

    def __init__(
        self,
        table: Path | None,
        events: Path | None,
        console: Console,
        agree: Callable[[str], str] = str,
    ) -> None:
        """Name the sinks; `setup` opens them.

        Args:
            table: metrics.csv; None on ranks other than 0.
            events: The directory of TensorBoard's event files, where they are wanted.
            console: Shows each epoch's row.
            agree: Gives rank 0's text instead of a worker's own, where several of them write
                snapshots: these have to be the same. Collective.
        """
        self._saved: tuple[Cells, ...] = ()
        """The newest rows, for the snapshots: a power cut may cost the table what it has last."""
        self._agree = agree
        self._table = table
        self._events = events
        self._console = console
        self._tensorboard: TensorBoardLog | None = None
        self._unwritten: list[Cells] = []

    def setup(
        self, components: Components, position: TrainState, saved: Mapping[str, object]
    ) -> None:
        """Open the sinks: rows of an earlier start beyond this position are dropped."""
        self._saved = _rows_of(saved.get("rows"))[-_SAVED_ROWS:]
        if self._table is not None:
            with storing(self._table):
                begun = start_table(self._table, position.epoch, self._saved)
                self._report_lost_rows(self._table, begun)
                if self._events is not None:
                    self._tensorboard = TensorBoardLog(self._events, first_step=position.step)

    def _report_lost_rows(self, table: Path, begun: Begun) -> None:
        if begun.rebuilt:
            self._console.warn(
                f"{plural(begun.rebuilt, 'row')} of {table} had been lost or damaged: back from "
                "the snapshot"
            )
        if begun.missing:
            self._console.warn(
                f"{plural(begun.missing, 'epoch')} up to now are missing from {table} and the "
                "report"
            )

    def end_epoch(self, row: EpochRow) -> None:
        """Record the epoch. Collective where there is an `agree`."""
        cells = cells_of(row)
        agreed = json.loads(self._agree(json.dumps(cells)))
        self._saved = (*self._saved, agreed)[-_SAVED_ROWS:]
        if self._table is not None:
            self._append(self._table, cells)
        if self._tensorboard is not None:
            self._tensorboard.add(row)
        self._console.epoch(row)

    def state_dict(self) -> Mapping[str, object]:
        """Give the newest rows."""
        return {"rows": [dict(row) for row in self._saved]}

    def _append(self, table: Path, row: Cells) -> None:
        """Add a row to the table; where the disk is full, keep it for the next time."""
        self._unwritten.append(row)
        # Of what snapshots don't hold any more all is on disk.
        synced = int(row["epoch"]) % (_SAVED_ROWS // 2) == 0
        try:
            append_rows(table, self._unwritten, synced=synced)
        except OSError as error:
            self._console.warn(
                f"{len(self._unwritten)} rows of {table.name} could not be written: "
                f"{error.strerror}; training goes on"
            )
        else:
            self._unwritten = []

    def close(self) -> None:
        """Close the sinks."""
        if self._tensorboard is not None:
            self._tensorboard.close()


def _rows_of(value: object) -> tuple[Cells, ...]:
    """Read the rows of a snapshot; an older Paceline wrote none."""
    listed = value if isinstance(value, list) else []
    return tuple(
        {name: cell for name, cell in row.items() if isinstance(cell, str)}
        for row in listed
        if isinstance(row, dict)
    )


def describe_advance(
    progress: TrainingProgress,
    agreed: Agreement,
    steps: int,
    lr: float,
    spent: Communication | None,
    *,
    top: int | None,
) -> Advance:
    """Say how far the training is.

    Args:
        progress: After it has taken the exchange in.
        agreed: The last exchange.
        steps: Steps since the exchange before.
        lr: Learning rate of the last step.
        spent: What these steps spent on communication; None of a single worker.
        top: 5 or 1 where accuracy is counted.
    """
    state, plan = progress.state, progress.plan
    left = max(0, state.total_steps - state.step)
    return Advance(
        epoch=state.epoch + 1,
        epochs=progress.loop.epochs,
        step=state.step_in_epoch,
        steps=progress.steps_per_epoch,
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


def last_lr(progress: TrainingProgress, optimizers: Sequence[Optimizer]) -> float:
    """Give the last step's learning rate, by our schedule or as the script has set it."""
    if progress.rate is not None:
        return progress.rate.lr_at(progress.state.step - 1)
    for optimizer in optimizers:
        return float(optimizer.param_groups[0]["lr"])
    return 0.0
