"""Which curves a run has: pure choices, no drawing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from paceline.options import figures
from paceline.report.load_run import RunReport
from paceline.results.json_object import entries, number, section, text, whole
from paceline.results.metrics_table import COLUMNS, Metrics, best_row

MAX_POINTS = 1000
"""More than a screen can show; keeps the page small for runs of thousands of epochs."""

MAX_OWN = 24
"""Charts of a script's own figures at most; the table of epochs has all."""

_SPAN = 50
"""Where the largest value is more than so many times the smallest, a scale is logarithmic."""

Scale = Literal["plain", "percent"]
Role = Literal["train", "validation", "single", "part"]


def spans_decades(values: Sequence[float]) -> bool:
    """Tell whether values lie so far apart that only a logarithmic scale shows them all."""
    return min(values, default=0.0) > 0 and max(values) / min(values) > _SPAN


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line of a chart."""

    label: str
    role: Role
    """Chooses colour and line style."""
    values: tuple[float, ...]
    """One for each place; NaN leaves a gap."""
    last: str
    """The newest value as text, for the legend."""
    places: tuple[float, ...] | None = None
    """Where the values stand along the bottom; None: at the chart's places."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A vertical line where an attempt began."""

    epoch: float
    step: int
    label: str


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One picture: lines over epochs or steps, with the training time along the top."""

    slug: str
    """Unique on the page; prefixes the ids inside the picture."""
    title: str
    scale: Scale
    from_zero: bool
    large: bool
    places: tuple[float, ...]
    """Epochs or steps, in ascending order."""
    times_s: tuple[float, ...]
    series: tuple[Series, ...]
    marks: tuple[Mark, ...]
    highlight: tuple[float, float] | None
    """A point (place, value) to ring: the best epoch."""
    axis: Literal["epoch", "step"] = "epoch"

    @property
    def logarithmic(self) -> bool:
        """Whether the values span so much that only a logarithmic axis shows them."""
        finite = [v for series in self.series for v in series.values if not math.isnan(v)]
        return self.scale != "percent" and not self.from_zero and spans_decades(finite)

    @property
    def description(self) -> str:
        """The chart in one sentence, for those who don't see it."""
        unit = " %" if self.scale == "percent" else ""
        parts = [f"{s.label} {_span(s.values, unit)}" for s in self.series]
        return f"{self.title} by {self.axis}: {'; '.join(parts)}"


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """A chart before its numbers: columns as (name, label, role)."""

    slug: str
    title: str
    columns: tuple[tuple[str, str, Role], ...]
    scale: Scale = "plain"
    from_zero: bool = False
    large: bool = False
    factor: float = 1.0


_PLANS = (
    _Plan(
        slug="loss",
        title="Loss",
        columns=(("train_loss", "training", "train"), ("val_loss", "validation", "validation")),
        large=True,
    ),
    _Plan(
        slug="accuracy",
        title="Accuracy",
        columns=(
            ("train_accuracy", "training", "train"),
            ("val_accuracy", "validation", "validation"),
        ),
        scale="percent",
        large=True,
    ),
    _Plan(
        slug="top5",
        title="Top-5 accuracy",
        columns=(
            ("train_top5_accuracy", "training", "train"),
            ("val_top5_accuracy", "validation", "validation"),
        ),
        scale="percent",
    ),
    _Plan(
        slug="speed",
        title="Samples/s",
        columns=(("images_per_s", "all workers", "single"),),
        from_zero=True,
    ),
    _Plan(
        slug="batch-time",
        title="Step time, ms",
        columns=(
            ("batch_time_s", "whole step", "single"),
            ("data_time_s", "waiting for data", "part"),
        ),
        from_zero=True,
        factor=1000,
    ),
    _Plan(slug="rate", title="Learning rate", columns=(("lr", "rate", "single"),), from_zero=True),
    _Plan(
        slug="communication",
        title="Communication",
        columns=(
            ("exposed_comm", "not hidden", "single"),
            ("waiting", "waiting for the slowest", "part"),
        ),
        scale="percent",
        from_zero=True,
    ),
    _Plan(
        slug="gpu",
        title="GPU utilization",
        columns=(("gpu_utilization", "mean of all workers", "single"),),
        scale="percent",
        from_zero=True,
    ),
    _Plan(
        slug="gpu-memory",
        title="GPU memory, GB",
        columns=(("gpu_memory_bytes", "most of a worker", "single"),),
        from_zero=True,
        factor=1e-9,
    ),
)


def choose_charts(report: RunReport) -> tuple[Chart, ...]:
    """Choose the charts that a run has numbers for, thinned to at most `MAX_POINTS` points."""
    metrics = report.metrics
    marks = find_marks(report)
    best = best_position(report)
    alone = number(section(report.run, "derived"), "world_size") == 1
    charts = []
    own = [
        _Plan(slug=f"own-{number}", title=name, columns=((name, name, "single"),))
        for number, name in enumerate(own_columns(metrics)[:MAX_OWN])
    ]
    for each in (*_PLANS, *own):
        if alone and each.slug == "communication":
            continue
        is_speed = each.slug == "speed"
        plan = replace(each, title=f"{report.unit.capitalize()}/s") if is_speed else each
        # Over steps where these were recorded within epochs, else over epochs.
        if plan.large and report.steps.has(plan.columns[0][0]):
            charts.append(_step_chart(plan, report, marks, best))
        elif any(metrics.has(name) for name, _, _ in plan.columns):
            charts.append(_chart(plan, metrics, marks, best))
    return tuple(charts)


def own_columns(metrics: Metrics) -> list[str]:
    """List the columns that a script has logged, by `s.log` or as further validation figures."""
    known = {name for plan in _PLANS for name, _, _ in plan.columns} | set(COLUMNS)
    return [name for name in metrics.columns if name not in known and metrics.has(name)]


def thin(length: int, limit: int, keep: Sequence[int] = ()) -> list[int]:
    """Choose at most `limit` of `length` positions, evenly, with the first, the last and `keep`."""
    if length <= limit:
        return list(range(length))
    # Room for those that are kept in any case.
    spread = max(limit - len(keep), 2)
    even = {round(i * (length - 1) / (spread - 1)) for i in range(spread)}
    return sorted(even | set(keep))


def middles(ends: Sequence[float], epoch_ends: Sequence[float]) -> tuple[float, ...]:
    """Return where the mean of each stretch between two rows is drawn: in its middle, a whole step.

    At their ends those of unequal stretches would make steps of a smooth curve.

    Args:
        ends: Where each row stands, in ascending order.
        epoch_ends: Where epochs end: at the last one before the first row its stretch begins.
    """
    begin = max((end for end in epoch_ends if end < min(ends, default=0.0)), default=0.0)
    found = [(before + end) / 2 for before, end in pairwise((begin, *ends))]
    return tuple(float(math.ceil(place)) for place in found)


def best_position(report: RunReport) -> int | None:
    """Find the best epoch's position: the summary's, else by the training's rule."""
    metrics = report.metrics
    best_epoch = number(report.summary, "best_epoch")
    if best_epoch is not None and best_epoch in metrics.column("epoch"):
        return metrics.column("epoch").index(best_epoch)
    return best_row(metrics, text(section(report.run, "settings"), "best_by"))


def find_marks(report: RunReport) -> tuple[Mark, ...]:
    """Place each restart and resume on the epoch axis, by the steps at which the epochs ended."""
    marks = []
    for entry in entries(report.run, "history"):
        reason = text(entry, "reason")
        step = whole(entry, "from_step")
        known = len(report.metrics) or len(report.steps)
        if reason in ("resume", "restart") and step is not None and known:
            label = "resumed" if reason == "resume" else "restarted"
            # Snapshots may lie within an epoch.
            epoch = _epoch_of_step(report.metrics, step)
            marks.append(Mark(epoch=epoch, step=step, label=f"{label} at step {step:,}"))
    return tuple(marks)


def _chart(plan: _Plan, metrics: Metrics, marks: tuple[Mark, ...], best: int | None) -> Chart:
    rows = thin(len(metrics), MAX_POINTS, () if best is None else (best,))
    epochs = metrics.column("epoch")
    highlight = None
    if plan.large and best is not None:
        value = metrics.column(f"val_{plan.slug}")[best]
        highlight = None if math.isnan(value) else (epochs[best], value)
    return Chart(
        slug=plan.slug,
        title=plan.title,
        scale=plan.scale,
        from_zero=plan.from_zero,
        large=plan.large,
        places=tuple(epochs[i] for i in rows),
        times_s=tuple(metrics.column("time_s")[i] for i in rows),
        series=tuple(
            _series(plan, metrics, column, rows)
            for column in plan.columns
            if metrics.has(column[0])
        ),
        marks=marks,
        highlight=highlight,
    )


def _step_chart(plan: _Plan, report: RunReport, marks: tuple[Mark, ...], best: int | None) -> Chart:
    """Draw training over its steps, and each epoch's validation as a point at its last step."""
    steps, metrics = report.steps, report.metrics
    # Training: a point per row of steps.csv, thinned out.
    rows = thin(len(steps), MAX_POINTS)
    trained = _series(plan, steps, plan.columns[0], rows)
    between = middles(steps.column("step"), metrics.column("step"))
    series = [replace(trained, places=tuple(between[i] for i in rows))]
    highlight = None
    # Validation: a point per epoch, at its last step; the best one is highlighted.
    if metrics.has(plan.columns[1][0]):
        epochs = thin(len(metrics), MAX_POINTS, () if best is None else (best,))
        evaluated = _series(plan, metrics, plan.columns[1], epochs)
        series.append(replace(evaluated, places=tuple(metrics.column("step")[i] for i in epochs)))
        if best is not None:
            place, value = metrics.column("step")[best], metrics.column(plan.columns[1][0])[best]
            highlight = None if math.isnan(place + value) else (place, value)
    return Chart(
        slug=plan.slug,
        title=plan.title,
        scale=plan.scale,
        from_zero=plan.from_zero,
        large=plan.large,
        places=tuple(steps.column("step")[i] for i in rows),
        times_s=tuple(steps.column("time_s")[i] for i in rows),
        series=tuple(series),
        marks=marks,
        highlight=highlight,
        axis="step",
    )


show_own = figures.dashed("{:.4g}".format)
"""Writes a figure of the script's own."""
_LAST_VALUE = {
    "loss": figures.dashed(figures.show_loss),
    "accuracy": figures.show_percent,
    "top5": figures.show_percent,
    "speed": figures.show_speed,
    "batch-time": figures.show_milliseconds,
    "rate": figures.dashed(figures.show_rate),
    "communication": figures.show_percent,
    "gpu": figures.show_percent,
    "gpu-memory": figures.dashed(figures.show_bytes),
}


def _series(
    plan: _Plan, metrics: Metrics, column: tuple[str, str, Role], rows: list[int]
) -> Series:
    name, label, role = column
    values = metrics.column(name)
    return Series(
        label=label,
        role=role,
        values=tuple(plan.factor * values[i] for i in rows),
        last=_LAST_VALUE.get(plan.slug, show_own)(metrics.last(name)),
    )


def _epoch_of_step(metrics: Metrics, step: int) -> float:
    """Interpolate between the ends of epochs; before the first one by the first one's length."""
    epochs = metrics.column("epoch")
    ends = metrics.column("step")
    if not epochs:
        return 0.0
    before = (epochs[0] - 1, 0.0)
    for epoch, end in zip(epochs, ends, strict=True):
        if math.isnan(end):
            continue
        if step <= end:
            length = end - before[1]
            share = (step - before[1]) / length if length > 0 else 1.0
            return before[0] + share * (epoch - before[0])
        before = (epoch, end)
    return before[0]


def _span(values: Sequence[float], unit: str) -> str:
    finite = [value for value in values if not math.isnan(value)]
    factor = 100 if unit else 1
    ends = [f"{factor * value:.4g}{unit}" for value in (finite[0], finite[-1])]
    return f"from {ends[0]} to {ends[1]}" if len(finite) > 1 else ends[0]
