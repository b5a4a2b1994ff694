"""Where an epoch's figures go: metrics.csv, TensorBoard, the console. Rank 0 alone writes."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import final

from paceline.metrics.console import Console
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
from paceline.training.snapshots.train_state import TrainState

_SAVED_ROWS = 1000
"""Rows that a snapshot holds: some 200 kB."""


@final
class Recorder:
    """Records epochs; on ranks other than 0 it does nothing."""

    def __init__(
        self,
        table: Path | None,
        events: Path | None,
        console: Console,
        agree: Callable[[str], str] = str,
    ) -> None:
        """Name the sinks; `start` opens them.

        Args:
            table: metrics.csv; None on ranks other than 0.
            events: The directory of TensorBoard's event files, where they are wanted.
            console: Shows each epoch's row.
            agree: Gives rank 0's text instead of a worker's own, where several of them write
                snapshots: these have to be the same. Collective.
        """
        self.saved: tuple[Cells, ...] = ()
        """The newest rows, for the snapshots: a power cut may cost the table what it has last."""
        self._agree = agree
        self._table = table
        self._events = events
        self._console = console
        self._tensorboard: TensorBoardLog | None = None
        self._unwritten: list[Cells] = []

    def start(self, state: TrainState, saved: Iterable[Cells] = ()) -> None:
        """Open the sinks at a position: later rows of an earlier start are dropped.

        Args:
            state: Where the training stands.
            saved: The rows that the snapshot has which it goes on from.
        """
        self.saved = tuple(saved)[-_SAVED_ROWS:]
        if self._table is not None:
            self._tell(self._table, start_table(self._table, state.epoch, self.saved))
            if self._events is not None:
                self._tensorboard = TensorBoardLog(self._events, first_step=state.step)

    def _tell(self, table: Path, begun: Begun) -> None:
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

    def add(self, row: EpochRow) -> None:
        """Record one epoch. Collective where there is an `agree`."""
        cells = cells_of(row)
        agreed = json.loads(self._agree(json.dumps(cells)))
        self.saved = (*self.saved, agreed)[-_SAVED_ROWS:]
        if self._table is not None:
            self._append(self._table, cells)
        if self._tensorboard is not None:
            self._tensorboard.add(row)
        self._console.epoch(row)

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
