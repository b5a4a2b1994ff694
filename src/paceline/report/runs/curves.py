"""Curves of several runs over each other: by step, by training time and by samples."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.options import figures
from paceline.options.fields import unknown_name
from paceline.report.charts import MAX_POINTS, middles, spans_decades, thin
from paceline.report.curves import choose_times
from paceline.report.runs.comparison import Comparison, Row
from paceline.report.runs.listing import RunEntry
from paceline.report.scaling.charts import Across, Line, Picture
from paceline.results.json_object import number, section

WAYS: Mapping[Across, str] = {"step": "step", "time": "training time", "samples": "samples seen"}
"""What curves are drawn over, and how it is called."""
METRICS = {
    "train_loss": "Training loss",
    "val_loss": "Validation loss",
    "val_accuracy": "Validation accuracy",
}
_COLUMNS: Mapping[Across, str] = {"step": "step", "time": "time_s", "samples": "samples"}
_ROWS = 6
_NOT_CURVES = {"epoch", "step", "time_s", "samples"}
_WHERE: Mapping[Across, Callable[[float], str]] = {
    "step": figures.show_count,
    "time": figures.show_seconds,
    "samples": figures.show_count,
}


@dataclass(frozen=True, kw_only=True)
class CurveTable:
    """One figure of all runs at some places along the way."""

    title: str
    across: str
    rows: tuple[Row, ...]
    """Named by the place; a cell is the newest value since the row before, empty without one."""


def curve(run: RunEntry, metric: str, across: Across) -> tuple[tuple[float, float], ...]:
    """Give the points at which a run's figure is known; none where it has no such figure.

    What was recorded within the epochs counts before the epochs' own figures.

    Args:
        metric: A column of `metrics.csv` or `steps.csv`.
        across: What the first number of a point is: steps, seconds or samples.
    """
    steps, metrics = run.report.steps, run.report.metrics
    places: Sequence[float]
    if steps.has(metric):
        values, places = steps.column(metric), steps.column(_COLUMNS[across])
    else:
        values, places = metrics.column(metric), _places(run, across)
    points = zip(places, values, strict=True)
    return tuple(p for p in points if not any(map(math.isnan, p)))


def choose_metric(runs: Sequence[RunEntry], requested: str | None) -> str:
    """Choose the figure to show: the one asked for, or one that most runs have.

    Args:
        requested: A column of `metrics.csv` or `steps.csv`; None for what the first run's
            `--best-by` says, unless most runs haven't that.

    Raises:
        UsageError: No run has what was asked for.
    """
    tables = [table for run in runs for table in (run.report.metrics, run.report.steps)]
    columns = [name for table in tables for name in table.columns]
    known = dict.fromkeys(name for name in columns if name not in _NOT_CURVES)
    if requested is not None:
        name = requested.replace("-", "_")
        if name not in known:
            raise UsageError(unknown_name(requested, known, "figure"))
        return name
    counts = {name: sum(_has(run, name) for run in runs) for name in (runs[0].best_by, *METRICS)}
    if counts[runs[0].best_by] > len(runs) / 2:
        return runs[0].best_by
    return max(counts, key=lambda name: counts[name])


def _has(run: RunEntry, metric: str) -> bool:
    return run.report.metrics.has(metric) or run.report.steps.has(metric)


def curve_tables(shown: Comparison, metric: str) -> list[CurveTable]:
    """Tabulate a figure along each way that the runs have gone; none where there are no values.

    A place where no run has a new value gets no row.
    """
    write = figures.show_percent if _is_share(metric) else figures.dashed(figures.show_loss)
    tables = []
    for across, name in WAYS.items():
        curves = [curve(run, metric, across) for run in shown.runs]
        ends = [points[-1][0] for points in curves if points]
        if not ends:
            continue
        rows = []
        before = -math.inf
        # A row for each place: the newest value of each run since the place before.
        for place in _choose_places(ends, across):
            values = tuple(_newest_within(points, before, place) for points in curves)
            before = place
            if all(value is None for value in values):
                continue  # says nothing of any run
            cells = tuple("" if value is None else write(value) for value in values)
            rows.append(Row(name=_WHERE[across](place), values=values, cells=cells))
        title = f"{METRICS.get(metric, metric)} by {name}"
        tables.append(CurveTable(title=title, across=across, rows=tuple(rows)))
    return tables


def curve_pictures(shown: Comparison, across: Across) -> list[Picture]:
    """Choose the pictures of one way: a line for each run that has the figure."""
    pictures = []
    for metric, title in METRICS.items():
        lines = tuple(
            line
            for colour in range(len(shown.runs))
            if (line := _line(shown, colour, metric, across)).points
        )
        if lines:
            picture = Picture(
                slug=f"{metric.replace('_', '-')}-{across}",
                title=title,
                caption="",
                across=across,
                lines=lines,
                percent=_is_share(metric),
                log_up=not _is_share(metric)
                and spans_decades([y for line in lines for _, y in line.points]),
            )
            pictures.append(picture)
    return pictures


def _line(shown: Comparison, place: int, metric: str, across: Across) -> Line:
    run = shown.runs[place]
    points = curve(run, metric, across)
    if run.report.steps.has(metric):
        places = middles([x for x, _ in points], _places(run, across), whole=across != "time")
        points = tuple(zip(places, (y for _, y in points), strict=True))
    points = tuple(points[i] for i in thin(len(points), MAX_POINTS))
    write = figures.show_percent if _is_share(metric) else figures.show_loss
    return Line(
        label=shown.letters[place],
        value=write(points[-1][1]) if points else "",
        colour=place,
        points=points,
    )


def _places(run: RunEntry, across: Across) -> Sequence[float]:
    metrics, derived = run.report.metrics, section(run.report.run, "derived")
    if across == "time":
        return metrics.column("time_s")
    if across == "step":
        return metrics.column("step")
    each, batch = number(derived, "train_samples"), number(derived, "global_batch")
    if each:
        return [epoch * each for epoch in metrics.column("epoch")]
    return [step * (batch or math.nan) for step in metrics.column("step")]


def _newest_within(
    points: Sequence[tuple[float, float]], before: float, place: float
) -> float | None:
    """Give the newest value after one place and up to another; None where there is none."""
    found = [y for x, y in points if before < x <= place]
    return found[-1] if found else None


def _choose_places(ends: Sequence[float], across: Across) -> list[float]:
    """Choose round places up to where the last run ends, and the place where each ends."""
    end = max(ends)
    step = _round_up(end / _ROWS)
    places = [step * number for number in range(1, _ROWS + 1)]
    if across == "time" and end >= 60:
        places = [float(time_s) for time_s in choose_times(end, most=_ROWS)]
    apart = [place for place in places if all(abs(place - each) > 0.02 * end for each in ends)]
    return sorted({place for place in apart if place < end} | set(ends))


def _round_up(value: float) -> float:
    """Round to one digit of 1, 2 and 5, and to 2.5 where that is whole."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    factors = (1, 2, 2.5, 5, 10) if power >= 10 else (1, 2, 5, 10)
    return next(factor * power for factor in factors if factor * power >= value)


def _is_share(metric: str) -> bool:
    return metric.endswith("accuracy")
