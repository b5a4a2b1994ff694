"""Where an epoch's figures go: metrics.csv, TensorBoard, the console. Rank 0 alone writes."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import final

from paceline.files import storing
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
from paceline.training.components import Components
from paceline.training.hooks.base import StepHook
from paceline.training.snapshots.train_state import TrainState

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

    def setup(self, parts: Components, position: TrainState, saved: Mapping[str, object]) -> None:
        """Open the sinks: rows of an earlier start beyond this position are dropped."""
        self._saved = _rows_of(saved.get("rows"))[-_SAVED_ROWS:]
        if self._table is not None:
            with storing(self._table):
                begun = start_table(self._table, position.epoch, self._saved)
                self._tell(self._table, begun)
                if self._events is not None:
                    self._tensorboard = TensorBoardLog(self._events, first_step=position.step)

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
