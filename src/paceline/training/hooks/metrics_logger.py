"""Records a training's metrics: in metrics.csv, steps.csv, TensorBoard and on the console.

Rank 0 alone writes; rows within an epoch on a thread, so that a slow disk holds no step up.
"""

import json
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import final

from paceline.checkpoint.state_encoding import require_entry, require_list, require_mapping
from paceline.files import storing
from paceline.metrics.console import Advance, Communication, Console
from paceline.metrics.counters import Totals
from paceline.metrics.tensorboard import TensorBoardLog
from paceline.options.figures import plural
from paceline.options.text import clause
from paceline.results.metrics_table import (
    EPOCHS,
    STEPS,
    Begun,
    Cells,
    EpochRow,
    StepRow,
    TableFormat,
    append_rows,
    cells_of,
    start_table,
)
from paceline.training.components import Components
from paceline.training.context import TrainingContext
from paceline.training.hooks.base import StepHook
from paceline.training.hooks.step_rows import StepMark, StepRows, row_between
from paceline.training.snapshots.train_state import TrainState
from paceline.training.status_exchange import Agreement

_SAVED_ROWS = 1000
"""Rows that a snapshot holds: some 200 kB."""
_KEPT_ROWS = 10_000
"""Rows that wait for room on a full disk; the oldest are given up."""
_END_S = 2.0
"""How long the end of a training waits for rows that are being written."""


@final
class TableFile:
    """A CSV file that rows are appended to; rows that can't be written are kept and tried again."""

    def __init__(self, path: Path, table: TableFormat, console: Console) -> None:
        """Create the table file.

        Args:
            path: Of the table, which `start` makes.
            table: Which one it is.
            console: Shows that rows can't be written.
        """
        self._path = path
        self._table = table
        self._console = console
        self._unwritten: deque[Cells] = deque(maxlen=_KEPT_ROWS)

    def start(self, completed: int, saved: Sequence[Cells] = ()) -> Begun:
        """Prepare the table; see `start_table`."""
        return start_table(self._path, completed, saved, self._table)

    def append(self, row: Cells, *, synced: bool = False) -> None:
        """Add a row; where the disk is full, keep it. By one thread alone."""
        self._unwritten.append(row)
        try:
            append_rows(self._path, tuple(self._unwritten), synced=synced, table=self._table)
        except (OSError, ValueError) as error:
            self._report(error)
        else:
            self._unwritten.clear()

    def _report(self, error: OSError | ValueError) -> None:
        """Report lost rows: of epochs each time, of steps at 1, 2, 4, 8 … of them."""
        rows = len(self._unwritten)
        if self._table is EPOCHS or rows & (rows - 1) == 0:
            self._console.warn(
                f"{rows} rows of {self._path.name} could not be written: "
                f"{getattr(error, 'strerror', None) or error}; training goes on"
            )


@final
class _WriterThread:
    """Runs tasks in order on a background thread."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # A daemon: a disk may hang, and the process must be able to end.
        self._thread = Thread(target=self._run, name="paceline-metrics", daemon=True)
        self._thread.start()

    def post(self, task: Callable[[], None]) -> None:
        """Queue a task. Doesn't block; an error ends the thread."""
        self._tasks.put(task)

    def end(self) -> None:
        """End the thread after all queued tasks; give up where that takes too long."""
        self._tasks.put(None)
        self._thread.join(_END_S)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()


@final
class MetricsLogger(StepHook):
    """Records a row an epoch, and rows within epochs; only rank 0 shows and writes them."""

    def __init__(self, context: TrainingContext, agree: Callable[[str], str] = str) -> None:
        """Name the sinks; `setup` opens them.

        Args:
            agree: Gives rank 0's text instead of a worker's own, where several of them write
                snapshots: these have to be the same. Collective.
        """
        self._saved: tuple[Cells, ...] = ()
        """The newest rows, for the snapshots: a power cut may cost the table what it has last."""
        self._agree = agree
        self._context = context
        self._rows = StepRows(context.config.metrics, context.progress)
        self._agreed: Agreement | None = None
        self._top: int | None = None
        self._epochs: TableFile | None = None
        self._steps: TableFile | None = None
        self._tensorboard: TensorBoardLog | None = None
        self._thread: _WriterThread | None = None
        if context.group.rank == 0:
            self._epochs = TableFile(context.run.metrics_csv, EPOCHS, context.console)
            self._steps = TableFile(context.run.steps_csv, STEPS, context.console)

    def setup(
        self, components: Components, position: TrainState, saved: Mapping[str, object]
    ) -> None:
        """Open the sinks: rows of an earlier start beyond this position are dropped."""
        rows = require_list(require_entry(saved, "rows")) if saved else []
        self._saved = _cells_of(rows)[-_SAVED_ROWS:]
        self._rows.begin(require_entry(saved, "step_mark") if saved else None)
        run = self._context.run
        if self._epochs is None or self._steps is None:
            return
        with storing(run.path):
            self._report_lost_rows(run.metrics_csv, self._epochs.start(position.epoch, self._saved))
            self._steps.start(position.step)
            if self._context.config.metrics.tensorboard:
                events = run.path / "tensorboard"
                self._tensorboard = TensorBoardLog(events, first_step=position.step)
        self._thread = _WriterThread()

    def _report_lost_rows(self, table: Path, begun: Begun) -> None:
        if begun.rebuilt:
            self._context.console.warn(
                f"{plural(begun.rebuilt, 'row')} of {table} had been lost or damaged: back from "
                "the snapshot"
            )
        if begun.missing:
            self._context.console.warn(
                f"{plural(begun.missing, 'epoch')} up to now are missing from {table} and the "
                "report"
            )

    def after_exchange(
        self, agreed: Agreement, steps: int, spent: Communication | None, top: int | None
    ) -> None:
        """Show how far the training is, and record a row where one is due."""
        self._agreed, self._top = agreed, top
        context = self._context
        if steps and context.console.is_due():
            context.console.advance(describe_advance(context, agreed, steps, spent, top=top))
        # All workers take the row, since its sums begin anew; rank 0 writes it.
        if self._rows.is_due():
            before, waits = self._rows.last, context.profiler.epoch_waits()
            self._record(before, self._rows.take(agreed, last_lr(context), waits))

    def _record(self, before: StepMark, after: StepMark) -> None:
        """Queue a row for the thread, which computes and writes rows in order."""
        if self._thread is not None:
            sized = self._context.progress.plan is not None
            self._thread.post(partial(self._write, before, after, bool(self._top), sized))

    def _write(self, before: StepMark, after: StepMark, accurate: bool, sized: bool) -> None:
        row = row_between(before, after, accurate=accurate, sized=sized)
        if self._steps is not None:
            self._steps.append(cells_of(row))
        self._show_on_tensorboard(row)

    def _show_on_tensorboard(self, row: EpochRow | StepRow) -> None:
        """Add a row to TensorBoard's events; what it can't write doesn't end a training."""
        tensorboard = self._tensorboard
        if tensorboard is None:
            return
        try:
            tensorboard.add(row)
        except (OSError, RuntimeError, ValueError) as error:  # its own thread's, raised again here
            self._tensorboard = None
            why = clause(error)
            self._context.console.warn(f"TensorBoard's events end here: {why}; training goes on")

    def end_epoch(self, row: EpochRow) -> None:
        """Record the epoch. Collective where there is an `agree`."""
        before = self._rows.last
        if self._agreed is not None and (rest := self._rows.take_rest(self._agreed, row)):
            self._record(before, rest)
        self._rows.end_epoch()
        cells = cells_of(row)
        agreed = json.loads(self._agree(json.dumps(cells)))
        self._saved = (*self._saved, agreed)[-_SAVED_ROWS:]
        if self._epochs is not None:
            # Of what snapshots don't hold any more all is on disk.
            self._epochs.append(cells, synced=row.epoch % (_SAVED_ROWS // 2) == 0)
        self._show_on_tensorboard(row)
        self._context.console.epoch(row, self._context.unit)

    def state_dict(self) -> Mapping[str, object]:
        """Give the newest rows, and from where the next one within the epoch counts."""
        return {"rows": [dict(row) for row in self._saved], "step_mark": self._rows.last.to_json()}

    def close(self) -> None:
        """Write what is left, and close the sinks."""
        if self._thread is not None:
            self._thread.end()
        if self._tensorboard is not None:
            with suppress(OSError):  # a full disk
                self._tensorboard.close()


def _cells_of(rows: Sequence[object]) -> tuple[Cells, ...]:
    return tuple({name: str(cell) for name, cell in require_mapping(row).items()} for row in rows)


def describe_advance(
    context: TrainingContext,
    agreed: Agreement,
    steps: int,
    spent: Communication | None,
    *,
    top: int | None,
) -> Advance:
    """Say how far the training is.

    Args:
        context: Of the training, after it has taken the exchange in.
        steps: Steps since the exchange before.
        spent: What these steps spent on communication; None of a single worker.
        top: 5 or 1 where accuracy is counted.
    """
    progress, gpu = context.progress, context.gpu
    state, plan = progress.state, progress.plan
    left = max(0, state.total_steps - state.step) if state.total_steps else None
    samples = 0
    if plan is not None:  # the last batch of an epoch may be shorter
        before, now = (
            min(round(place * plan.mean_batch), plan.train_samples or sys.maxsize)
            for place in (state.step_in_epoch - steps, state.step_in_epoch)
        )
        samples = now - before
    return Advance(
        epoch=state.epoch + 1,
        epochs=progress.loop.epochs,
        step=state.step_in_epoch,
        steps=progress.steps_per_epoch,
        loss=agreed.totals.mean_loss,
        accuracy=agreed.totals.accuracy if top else None,
        images_per_s=samples / agreed.lap_s if samples else 0.0,
        lr=last_lr(context),
        eta_s=None if left is None else left * state.elapsed_s / max(1, state.step),
        spent=spent,
        gpu_utilization=gpu.utilization if gpu else None,
        gpu_memory_bytes=gpu.memory_bytes if gpu else None,
        unit=context.unit,
    )


def epoch_row(context: TrainingContext, trained: Totals, top: int, *, sized: bool) -> EpochRow:
    """Make the row of the epoch that ends. Collective.

    Args:
        top: 5 or 1 where accuracy was counted, else 0.
        sized: Whether it is known how many samples a step had.
    """
    state, epoch = context.progress.state, context.epoch
    seconds, steps = state.epoch_train_s, max(1, state.step_in_epoch)
    spent = context.profiler.close_epoch()
    of_gpus = context.gpu.close_epoch(context.group) if context.gpu is not None else {}
    return EpochRow(
        epoch=state.epoch + 1,
        step=state.step,
        time_s=state.elapsed_s,
        train_loss=state.train_loss,
        train_accuracy=trained.accuracy if top else None,
        train_top5_accuracy=trained.top5_accuracy if top == 5 else None,
        val_loss=state.val_loss if epoch.validated else None,
        val_accuracy=state.val_accuracy if epoch.validated else None,
        val_top5_accuracy=state.val_top5_accuracy if epoch.validated else None,
        lr=last_lr(context) if epoch.lr is None else epoch.lr,
        images_per_s=trained.samples / seconds if sized and seconds > 0 else 0.0,
        batch_time_s=seconds / steps,
        data_time_s=state.epoch_data_s / steps,
        exposed_comm=spent.exposed if spent else None,
        waiting=spent.waiting if spent else None,
        wire_bytes_per_step=spent.wire_bytes if spent else None,
        extra={**of_gpus, **epoch.logged},
    )


def last_lr(context: TrainingContext) -> float:
    """Give the last step's learning rate, by our schedule or as the script has set it."""
    progress = context.progress
    if progress.rate is not None:
        return progress.rate.lr_at(progress.state.step - 1)
    for optimizer in context.components.optimizers:
        return float(optimizer.param_groups[0]["lr"])
    return 0.0
