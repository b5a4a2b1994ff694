"""Rows of steps.csv: decides when one is due, and computes it."""

import math
from typing import NamedTuple, final

from paceline.checkpoint.state_encoding import require_mapping
from paceline.errors import SnapshotError
from paceline.metrics.counters import Totals
from paceline.metrics.options import MetricsOptions
from paceline.results.json_object import number
from paceline.results.metrics_table import EpochRow, StepRow
from paceline.training.progress import TrainingProgress
from paceline.training.status_exchange import Agreement

_ROWS_AN_EPOCH = 200
_MAX_GAP_S = 10.0
"""With `auto` rows are no further apart."""
_NEVER = 1 << 62
"""More steps than any training has."""


class StepMark(NamedTuple):
    """Sums at a step, over all workers; what lies between two of them makes a row."""

    epoch: int = 1
    """Counted from 1."""
    step: int = 0
    time_s: float = 0.0
    """Training time."""
    train_s: float = 0.0
    """The part of it that was spent on steps."""
    samples: int = 0
    """Samples trained on in all epochs."""
    totals: Totals = Totals()  # nobody changes it
    """Sums of the epoch so far."""
    lr: float = 0.0
    waits: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Of this start's steps of the epoch so far: their time, how long the slowest worker waited for
    communication in it, and how long all workers waited, on average."""

    @staticmethod
    def from_json(content: object) -> "StepMark":
        """Read what a snapshot has.

        Raises:
            SnapshotError: A figure is missing.
        """
        saved = require_mapping(content)
        values: dict[str, float] = {}
        for name in StepMark().to_json():
            value = number(saved, name)
            if value is None:
                raise SnapshotError(
                    f"the snapshot's state.json isn't complete: step_mark has no {name}"
                )
            values[name] = value
        return StepMark(
            step=int(values["step"]),
            train_s=values["train_s"],
            totals=Totals(
                loss=values["loss"], samples=int(values["counted"]), top1=int(values["right"])
            ),
        )

    def to_json(self) -> dict[str, object]:
        """Give what the next row needs of this one, for a snapshot."""
        totals = self.totals
        return {
            "step": self.step,
            "train_s": self.train_s,
            "loss": totals.loss,
            "counted": totals.samples,
            "right": totals.top1,
        }


def row_between(before: StepMark, after: StepMark, *, accurate: bool, sized: bool) -> StepRow:
    """Make the row of the steps between two marks of an epoch.

    Args:
        before: At the row before, or the beginning of the epoch.
        after: At the row's own step.
        accurate: Whether right guesses are counted.
        sized: Whether it is known how many samples a step has.
    """
    counted = after.totals.samples - before.totals.samples
    seconds = after.train_s - before.train_s
    lap_s, exposed_s, waited_s = (b - a for a, b in zip(before.waits, after.waits, strict=True))
    right = after.totals.top1 - before.totals.top1
    return StepRow(
        epoch=after.epoch,
        step=after.step,
        time_s=after.time_s,
        samples=after.samples if sized else None,
        train_loss=(after.totals.loss - before.totals.loss) / counted if counted else None,
        train_accuracy=right / counted if accurate and counted else None,
        lr=after.lr,
        images_per_s=counted / seconds if sized and seconds > 0 else None,
        exposed_comm=min(1.0, exposed_s / lap_s) if lap_s > 0 else None,
        waiting=min(1.0, (waited_s - exposed_s) / lap_s) if lap_s > 0 else None,
    )


@final
class StepRows:
    """Decides when a row is due; the same on every worker, since it goes by what all know alike."""

    def __init__(self, options: MetricsOptions, progress: TrainingProgress) -> None:
        """Create the step rows.

        Args:
            options: How often.
            progress: Of the training; `begin` comes once it stands where the training does.
        """
        self._options = options
        self._progress = progress
        self._stride = _NEVER
        self._gap_s: float | None = None
        self._next_step: int = 0
        self._next_s = 0.0
        self.last = StepMark()
        """At the last row, or where the epoch began."""

    def begin(self, saved: object) -> None:
        """Go on from a training's position.

        Args:
            saved: Of `last`, as the snapshot has it; None of a new training.
        """
        options, progress = self._options, self._progress
        state = progress.state
        began = StepMark(
            step=state.step - state.step_in_epoch, train_s=state.train_s - state.epoch_train_s
        )
        self.last = began if saved is None else StepMark.from_json(saved)
        # How often: by steps, by time, or by both.
        is_auto = options.log_every_steps is None and options.log_every_s is None
        per_row = -(-progress.steps_per_epoch // _ROWS_AN_EPOCH)
        self._stride = options.log_every_steps or (is_auto and per_row) or _NEVER
        self._gap_s = math.inf if options.log_every_steps else options.log_every_s
        if is_auto and per_row:
            self._gap_s = _MAX_GAP_S
        self._plan_next()
        if is_auto and state.step == 0:
            self._next_step = 1  # how it begins is worth a row

    def is_due(self) -> bool:
        """Tell after an exchange whether the steps since the last row are to get one.

        They do at the end of an epoch, and where the training is being stopped, in any case.
        """
        progress = self._progress
        state = progress.state
        return state.step > self.last.step and (
            state.step >= self._next_step
            or state.train_s >= self._next_s
            or progress.has_seen_all
            or progress.stopping is not None
        )

    def take(self, agreed: Agreement, lr: float, waits: tuple[float, float, float]) -> StepMark:
        """Take the mark of a row that is due."""
        state = self._progress.state
        self.last = StepMark(
            state.epoch + 1,
            state.step,
            state.elapsed_s,
            state.train_s,
            state.samples_seen,
            agreed.totals,
            lr,
            waits,
        )
        self._plan_next()
        return self.last

    def take_rest(self, agreed: Agreement, row: EpochRow) -> StepMark | None:
        """Take the mark of an epoch's last steps where no row has been due at its end.

        That is where a script leaves its loop early, or has one without epochs.
        """
        if row.step <= self.last.step:
            return None
        return self.take(agreed, row.lr, self.last.waits)._replace(epoch=row.epoch)

    def end_epoch(self) -> None:
        """Begin the sums of another epoch."""
        if self._progress.state.step_in_epoch == 0:
            self.last = self.last._replace(totals=Totals(), waits=(0.0, 0.0, 0.0))

    def _plan_next(self) -> None:
        """Plan the next row: at a multiple of so many steps, or after a time."""
        last, gap_s = self.last, self._gap_s
        self._next_step = (last.step // self._stride + 1) * self._stride
        if gap_s is None:  # nobody knows how long an epoch is: further and further apart
            gap_s = min(_MAX_GAP_S, last.train_s / _ROWS_AN_EPOCH)
        self._next_s = last.train_s + gap_s
