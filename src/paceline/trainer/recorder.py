"""Where an epoch's figures go: metrics.csv, TensorBoard, the console. Rank 0 alone writes."""

from pathlib import Path
from typing import final

from paceline.metrics.console import Console
from paceline.metrics.table import EpochRow, append_rows, start_table
from paceline.metrics.tensorboard import TensorBoardLog
from paceline.trainer.state import TrainState


@final
class Recorder:
    """Records epochs; on ranks other than 0 it does nothing."""

    def __init__(self, table: Path | None, events: Path | None, console: Console) -> None:
        """Name the sinks; `start` opens them.

        Args:
            table: metrics.csv; None on ranks other than 0.
            events: The directory of TensorBoard's event files, where they are wanted.
            console: Shows each epoch's row.
        """
        self._table = table
        self._events = events
        self._console = console
        self._tensorboard: TensorBoardLog | None = None
        self._unwritten: list[EpochRow] = []

    def start(self, state: TrainState) -> None:
        """Open the sinks at a position: later rows of an earlier start are dropped."""
        if self._table is not None:
            start_table(self._table, completed_epochs=state.epoch)
            if self._events is not None:
                self._tensorboard = TensorBoardLog(self._events, first_step=state.step)

    def add(self, row: EpochRow) -> None:
        """Record one epoch."""
        if self._table is not None:
            self._append(self._table, row)
        if self._tensorboard is not None:
            self._tensorboard.add(row)
        self._console.epoch(row)

    def _append(self, table: Path, row: EpochRow) -> None:
        """Add a row to the table; where the disk is full, keep it for the next time."""
        self._unwritten.append(row)
        try:
            append_rows(table, self._unwritten)
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
