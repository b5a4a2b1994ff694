"""The status of a run, from its files alone: read again and again while it runs, or once."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import final

from paceline.errors import DataError, UsageError
from paceline.launch.watchdog.stragglers import WorkerSpeed, read_live
from paceline.options.durations import parse_duration_s
from paceline.report.charts import best_position, spans_decades
from paceline.report.load_run import RunReport, read_run
from paceline.report.run_outcome import RunState, describe_ending, find_state
from paceline.results.growing_table import GrowingTable
from paceline.results.json_object import entries, number, section, text, whole
from paceline.results.metrics_table import STEPS, TABLE_MAX_BYTES, Metrics, parse_metrics
from paceline.results.profile import StepProfile
from paceline.results.run_directory import RunDirectory, SampleUnit

_DIED = (
    "ended without a word: its launcher was killed, or this is a copy of a training that runs "
    "elsewhere"
)


_RECENT_S = 5.0
"""The speed is that of so much time: a row of a short epoch may be a single step."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The status of a run; a field is None where that isn't known (yet).

    Flat, since each field is a key of what `paceline watch --json` prints.
    """

    path: str
    recipe: str
    state: RunState
    sentence: str
    """How it ended; empty while it runs."""
    resume: str
    """The command that goes on from the newest snapshot, where that makes sense."""
    workers: int | None
    nodes: int | None
    restarts: int
    speeds: tuple[WorkerSpeed, ...]
    """What each worker does and how fast, the slowest first; empty where that isn't known."""
    epoch: int | None
    """The one under way, from 1; of a run that has ended the last one."""
    epochs: int | None
    step: int | None
    steps: int | None
    """Of the whole training, unless something ends it before."""
    time_s: float | None
    eta_s: float | None
    """Until its end, of a run that goes on."""
    age_s: float | None
    """How old the newest figures are."""
    train_loss: float | None
    train_accuracy: float | None
    lr: float | None
    images_per_s: float | None
    sample_unit: SampleUnit
    exposed_comm: float | None
    waiting: float | None
    parts: Mapping[str, float] | None
    """Shares of a step's time, by what they are spent on."""
    val_epoch: int | None
    """The last epoch with validation figures."""
    val_loss: float | None
    val_accuracy: float | None
    best_epoch: int | None
    best_val_loss: float | None
    best_val_accuracy: float | None
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Give the JSON object for other programs."""
        return asdict(self)


@final
class RunFollower:
    """Reads a run again and again; of the rows within epochs only those that are new."""

    def __init__(self, run: RunDirectory) -> None:
        """Create the run follower.

        Args:
            run: The run directory; it is only read.
        """
        self._run = run
        self._steps = GrowingTable(run.steps_csv, TABLE_MAX_BYTES)
        self._last: Mapping[str, float] = {}
        self._recent: list[tuple[float, float, float]] = []
        self.losses: list[float] = []
        """Training losses in the order of steps; of epochs where there are no rows within them."""

    def read(self) -> RunStatus:
        """Read the run's current status."""
        report = read_run(self._run, with_steps=False)
        if not report.summary and not report.locked:
            report = read_run(self._run, with_steps=False)  # it may have ended between two files
        with suppress(OSError, ValueError):  # none, or not ours: the epochs have to do
            self._follow()
        epochs = report.metrics
        last = self._last
        if not last:
            self.losses = [loss for loss in epochs.column("train_loss") if not math.isnan(loss)]
            last = _last_row(epochs)
        return status_of(report, last, _shares(self._run), self._age_s())

    def _follow(self) -> None:
        """Read the rows that were added since the last time.

        Raises:
            OSError, ValueError: There is no such table, or it isn't a file.
        """
        content, is_anew = self._steps.read()
        if is_anew:  # by a resume
            self._last, self._recent, self.losses = {}, [], []
        rows = parse_metrics(content, STEPS)
        self._last = _last_row(rows) or self._last
        # The speed of the last seconds stands in for that of the newest row.
        columns = map(rows.column, ("time_s", "step", "images_per_s"))
        read = [*self._recent, *zip(*columns, strict=True)]
        self._recent = [row for row in read if row[0] >= read[-1][0] - _RECENT_S and row[2] > 0]
        if self._recent:
            self._last = {**self._last, "images_per_s": _mean_speed(self._recent)}
        self.losses += [loss for loss in rows.column("train_loss") if not math.isnan(loss)]

    def _age_s(self) -> float | None:
        for table in (self._run.steps_csv, self._run.metrics_csv):
            with suppress(OSError):
                return max(0.0, time.time() - table.stat().st_mtime)
        return None


def status_of(
    report: RunReport,
    last: Mapping[str, float],
    parts: Mapping[str, float] | None,
    age_s: float | None,
) -> RunStatus:
    """Put together the status of a run.

    Args:
        report: The run, without the rows within its epochs.
        last: The newest row's numbers, of steps or of epochs.
        parts: Shares of a step's time.
        age_s: How old the newest figures are.
    """
    # What the run's files say, and what follows from several of them.
    state, ending = find_state(report), describe_ending(report)
    settings, derived = section(report.run, "settings"), section(report.run, "derived")
    history = entries(report.run, "history")
    # How far it is: by the summary, else by the newest row, else by where it began.
    epochs, per_epoch = whole(settings, "epochs"), whole(derived, "steps_per_epoch")
    steps = epochs * per_epoch if epochs and per_epoch else None
    begun = number(history[-1], "from_step") if history else None
    step = _either(number(report.summary, "steps"), last.get("step"), begun)
    time_s = _either(number(report.summary, "train_time_s"), last.get("time_s"))
    evaluated, best = _last_evaluated(report.metrics), best_position(report)
    return RunStatus(
        path=str(report.path),
        recipe=text(report.run, "recipe"),
        state=state,
        sentence={"running": "", "died": _DIED}.get(state, ending.sentence),
        resume="" if state == "running" else ending.resume,
        workers=whole(derived, "world_size"),
        nodes=whole(derived, "nodes"),
        speeds=tuple(read_live(report.path / "logs")) if state == "running" else (),
        restarts=sum(text(entry, "reason") == "restart" for entry in history),
        epoch=_int(last.get("epoch")),
        epochs=epochs if per_epoch or len(report.metrics) > 1 else None,
        step=_int(step),
        steps=steps,
        time_s=time_s,
        eta_s=_eta_s(settings, step, steps, time_s) if state == "running" else None,
        age_s=age_s,
        train_loss=last.get("train_loss"),
        train_accuracy=last.get("train_accuracy"),
        lr=last.get("lr"),
        images_per_s=_either(number(report.summary, "images_per_s"), last.get("images_per_s")),
        sample_unit=report.unit,
        exposed_comm=last.get("exposed_comm"),
        waiting=last.get("waiting"),
        parts=parts,
        val_epoch=_int(_cell(report.metrics, "epoch", evaluated)),
        val_loss=_cell(report.metrics, "val_loss", evaluated),
        val_accuracy=_cell(report.metrics, "val_accuracy", evaluated),
        best_epoch=_int(_cell(report.metrics, "epoch", best)),
        best_val_loss=_cell(report.metrics, "val_loss", best),
        best_val_accuracy=_cell(report.metrics, "val_accuracy", best),
        problems=report.problems,
    )


def sparkline(values: Sequence[float], width: int, *, plain: bool = False) -> str:
    """Draw values as one line, each column the mean of its share of them.

    Args:
        values: Finite ones, in order; on a logarithmic scale where they `spans_decades`.
        width: Columns at most.
        plain: With ASCII alone.
    """
    if spans_decades(values):
        values = [math.log(value) for value in values]
    marks = "_.-=+*#" if plain else "▁▂▃▄▅▆▇█"
    columns = min(width, len(values))
    ends = [round(i * len(values) / columns) for i in range(columns + 1)] if columns > 0 else []
    means = [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(ends)]
    low, high = min(means, default=0.0), max(means, default=0.0)
    scale = (len(marks) - 1) / (high - low) if high > low else 0.0
    return "".join(marks[round((mean - low) * scale)] for mean in means)


def _shares(run: RunDirectory) -> Mapping[str, float] | None:
    """Read where a step's time goes; None where the training hasn't said so yet."""
    try:
        profile = StepProfile.read(run.profile_json)
    except DataError:
        return None
    parts = {name: max(0.0, seconds) for name, seconds in asdict(profile.parts).items()}
    total_s = sum(parts.values())
    return {name: part / total_s for name, part in parts.items()} if total_s > 0 else None


def _eta_s(
    settings: Mapping[str, object], step: float | None, steps: int | None, time_s: float | None
) -> float | None:
    """Estimate the time to the end at the pace so far, a time budget at most."""
    left: list[float] = []
    if step and steps and time_s is not None:
        left.append(max(0.0, (steps - step) * time_s / step))
    budget = text(settings, "time_budget")
    if budget and time_s is not None:
        with suppress(UsageError):
            left.append(max(0.0, parse_duration_s(budget) - time_s))
    return min(left, default=None)


def _mean_speed(rows: Sequence[tuple[float, float, float]]) -> float:
    """Give the mean speed of several rows: all their steps by all their time.

    Args:
        rows: Of each its time, its step and its speed, which counts since the row before.
    """
    # Of the first row nobody knows how many steps it stands for: it counts where it is alone.
    counted = [(end[1] - start[1], end[2]) for start, end in pairwise(rows)]
    counted = [(steps, speed) for steps, speed in counted if steps > 0]
    if not counted:
        return rows[-1][2]
    return sum(steps for steps, _ in counted) / sum(steps / speed for steps, speed in counted)


def _last_row(table: Metrics) -> dict[str, float]:
    """Give the numbers of the newest row; empty where there is none."""
    last = {name: values[-1] for name, values in table.columns.items() if values}
    return {name: value for name, value in last.items() if not math.isnan(value)}


def _last_evaluated(metrics: Metrics) -> int | None:
    """Find the last epoch with validation figures."""
    pairs = zip(metrics.column("val_loss"), metrics.column("val_accuracy"), strict=True)
    known = [i for i, pair in enumerate(pairs) if not all(map(math.isnan, pair))]
    return known[-1] if known else None


def _cell(metrics: Metrics, name: str, position: int | None) -> float | None:
    value = math.nan if position is None else metrics.column(name)[position]
    return None if math.isnan(value) else value


def _either(*values: float | None) -> float | None:
    """Give the first that is known."""
    return next((value for value in values if value is not None), None)


def _int(value: float | None) -> int | None:
    return None if value is None else int(value)
