"""Draws one chart with matplotlib, without pyplot and its global state, as SVG for the page."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from paceline.report.charts import Chart, Role, Scale, Series
from paceline.report.svg import (
    ACCENT,
    COLOURS,
    MUTED,
    PAPER,
    TRAIN,
    figure_to_svg,
    make_axes,
    name_axes,
    plain,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 420.0, 250.0  # Points of the view box; the picture is as wide as its place.
_MARGINS = (54.0, 14.0, 24.0, 40.0)
_UP = {
    "loss": "loss",
    "accuracy": "accuracy",
    "top5": "top-5",
    "batch-time": "ms",
    "rate": "rate",
    "communication": "of the time",
}
"""What goes up, by the chart's slug."""

_COLOUR: dict[Role, str] = {
    "train": TRAIN,
    "validation": ACCENT,
    "single": ACCENT,
    "part": TRAIN,
}
_STROKE: dict[Role, float] = {"train": 1.4, "validation": 2.0, "single": 1.8, "part": 1.4}

_MAX_MARKERS = 60
"""More points are a line without markers."""
_NICE_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200)
_DAY_S = 86400
_CHARACTER = 7.5
"""Width of a character, about the largest: narrow pictures have larger ones."""


def draw_chart(chart: Chart) -> str:
    """Draw a chart as inline SVG; the same chart always gives the same text."""
    figure, axes = make_axes(WIDTH, HEIGHT, _MARGINS)
    for series in chart.series:
        _draw_series(axes, chart, series)
    _set_range(axes, chart)
    _label_values(axes, chart.scale)
    name_axes(axes, _MARGINS, across=chart.axis, up=_up(chart))
    _draw_marks(axes, chart)
    _label_times(axes, chart)
    return figure_to_svg(figure, slug=chart.slug, label=chart.description, colours=COLOURS)


def _up(chart: Chart) -> str:
    return _UP.get(chart.slug, chart.title.lower())


def choose_times(total_s: float, most: int = 4) -> list[int]:
    """Choose at most `most` round times up to the whole time, evenly spaced."""
    # The smallest round step that gives no more than `most` marks.
    steps = [*_NICE_S, *(_DAY_S * days for days in (1, 2, 5, 10, 20, 50, 100))]
    step = next((s for s in steps if total_s / s < most + 1), steps[-1])
    return [step * i for i in range(1, min(int(total_s // step), most) + 1)]


def clock(seconds: int) -> str:
    """Write a round time in its largest whole unit: `30 s`, `5 min`, `2 h`, `3 d`."""
    units = ((_DAY_S, "d"), (3600, "h"), (60, "min"), (1, "s"))
    size, unit = next((s, u) for s, u in units if seconds % s == 0)
    return f"{seconds // size} {unit}"


def _draw_series(axes: "Axes", chart: Chart, series: Series) -> None:
    colour = _COLOUR[series.role]
    # A point between gaps has no line: it gets a marker, as each epoch has among the steps.
    among_steps = chart.axis == "step" and series.role == "validation"
    lone = [i for i in range(len(series.values)) if _stands_alone(series.values, i)]
    places = chart.places if series.places is None else series.places
    axes.plot(
        places,
        series.values,
        label=series.label,
        color=colour,
        linewidth=_STROKE[series.role],
        marker="o" if lone or among_steps else "",
        markersize=4,
        markevery=None if among_steps and len(places) <= _MAX_MARKERS else lone,
        solid_joinstyle="round",
    )
    if chart.from_zero:
        axes.fill_between(places, series.values, color=colour, alpha=0.1, linewidth=0, zorder=1)


def _stands_alone(values: Sequence[float], position: int) -> bool:
    """Whether a point has no neighbour that a line could join it to."""
    around = (position - 1, position + 1)
    joined = any(0 <= i < len(values) and not math.isnan(values[i]) for i in around)
    return not math.isnan(values[position]) and not joined


def _set_range(axes: "Axes", chart: Chart) -> None:
    ends = [(s.places or chart.places)[i] for s in chart.series for i in (0, -1)]
    first, last = min(ends), max(ends)
    margin = 0.02 * (last - first) if last > first else 1.0
    axes.set_xlim(first - margin, last + margin)
    if chart.logarithmic:
        axes.set_yscale("log")
    elif chart.from_zero:
        highest = max((v for s in chart.series for v in s.values if not math.isnan(v)), default=0.0)
        axes.set_ylim(0, 1.1 * highest if highest > 0 else 1.0)
    # The best epoch.
    if chart.highlight is not None:
        axes.plot(
            *([value] for value in chart.highlight),
            linestyle="none",
            marker="o",
            markersize=7,
            markerfacecolor=PAPER,
            markeredgecolor=ACCENT,
            markeredgewidth=1.8,
            clip_on=False,
        )


def _label_values(axes: "Axes", scale: Scale) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5), numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda v, _: f"{100 * v:.6g} %" if scale == "percent" else plain(v))
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))


def _draw_marks(axes: "Axes", chart: Chart) -> None:
    low, high = axes.get_xlim()
    for mark in chart.marks:
        place = min(max(mark.step if chart.axis == "step" else mark.epoch, low), high)
        axes.axvline(place, color=MUTED, linewidth=1, dashes=(2, 3), zorder=1)


def _label_times(axes: "Axes", chart: Chart) -> None:
    """Write the training time along the top, where round times fall between epochs or steps.

    Where it trained faster for a while they are close to each other: some are left out.
    """
    low, high = axes.get_xlim()
    across = (WIDTH - _MARGINS[0] - _MARGINS[1]) / (high - low)
    occupied = _CHARACTER * len(_up(chart)) - _MARGINS[0]  # what goes up is named there
    for time_s, place in time_places(chart):
        text = clock(time_s)
        middle, half = (place - low) * across, _CHARACTER * len(text) / 2
        if low <= place <= high and middle - half >= occupied:
            occupied = middle + half + _CHARACTER
            axes.annotate(
                text,
                (place, 1),
                xycoords=("data", "axes fraction"),
                xytext=(0, 9),
                textcoords="offset points",
                ha="center",
                color=MUTED,
            )
            axes.plot(
                [place, place],
                [1.0, 1.02],
                transform=axes.get_xaxis_transform(),
                color=MUTED,
                linewidth=1,
                clip_on=False,
            )


def time_places(chart: Chart) -> list[tuple[int, float]]:
    """Round times with the places at which they had passed; none where times don't grow."""
    known = [(t, e) for t, e in zip(chart.times_s, chart.places, strict=True) if not math.isnan(t)]
    if not known or any(b[0] <= a[0] for a, b in pairwise(known)):
        return []
    # Time 0 is the beginning of the first epoch, or step 0.
    points = [(0.0, 0.0 if chart.axis == "step" else chart.places[0] - 1), *known]
    return [(time_s, _interpolate(points, time_s)) for time_s in choose_times(known[-1][0])]


def _interpolate(points: Sequence[tuple[float, float]], at: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(points):
        if at <= x1:
            return y0 + (y1 - y0) * (at - x0) / (x1 - x0)
    return points[-1][1]
