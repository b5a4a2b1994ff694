"""Draws the pictures that are made of lines, as SVG for the page."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from paceline.report.curves import choose_times, clock
from paceline.report.scaling.charts import COLOURS_THERE, Interval, Line, Picture
from paceline.report.svg import (
    BAD,
    COLOURS,
    LINE,
    MUTED,
    PAPER,
    figure_to_svg,
    make_axes,
    name_axes,
    plain,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 420.0, 272.0  # Points of the view box; the picture is as wide as its place.
_MARGINS = (54.0, 16.0, 24.0, 44.0)
_LETTER = 7.4  # The width of a digit where the page is narrow and text is largest.
_BETWEEN = 6.0  # Points between two labels, at least.

_STAND_INS = {f"#0f000{place}": f"var(--s{place})" for place in range(COLOURS_THERE)}
_LINES = tuple(_STAND_INS)
_DASH = 2.5  # Line widths.
_DIGITS = ((5.0, (1, 1.5, 2, 3, 4, 5, 7)), (200.0, (1, 2, 5)), (math.inf, (1,)))
"""Which multiples of powers of ten a logarithmic axis has room for, up to so large a factor."""
_ROUND_S = (1, 10, 60, 600, 3600, 6 * 3600, 86400, 10 * 86400, 100 * 86400)
_NAMES = {"workers": "workers", "time": "training time", "samples": "samples", "step": "steps"}


def draw_lines(picture: Picture) -> str:
    """Draw a picture as inline SVG; the same picture always gives the same text."""
    figure, axes = make_axes(WIDTH, HEIGHT, _MARGINS)
    for line in picture.lines:
        _draw_line(axes, picture, line)
    _scale_up(axes, picture)
    _scale_across(axes, picture)
    for event in picture.events:
        colour, dashes = (BAD, (4, 2)) if event.is_fault else (MUTED, (2, 3))
        axes.axvline(event.place, color=colour, linewidth=1.4, dashes=dashes, clip_on=False)
    name_axes(axes, _MARGINS, across=_NAMES[picture.across], up=_up(picture))
    colours = COLOURS | _STAND_INS
    return figure_to_svg(figure, slug=picture.slug, label=picture.description, colours=colours)


def _up(picture: Picture) -> str:
    """What goes up: the title's own words, without what it is drawn over."""
    return (
        "images/s" if picture.slug == "throughput" else picture.title.partition(" by ")[0].lower()
    )


def choose_labels(places: Sequence[tuple[float, str]]) -> list[int]:
    """Choose which of the labels along an axis to write so that none touches another.

    The last one is always written, then the first, then from the left what still fits.

    Args:
        places: Where each stands, in points, and its text.
    """
    chosen: list[int] = []
    # By priority: a label is written where it touches none that has been chosen.
    order = [len(places) - 1, *range(len(places) - 1)] if places else []
    for number in order:
        place, label = places[number]
        others = [(abs(place - places[i][0]), len(places[i][1])) for i in chosen]
        if all(apart >= (len(label) + other) * _LETTER / 2 + _BETWEEN for apart, other in others):
            chosen.append(number)
    return sorted(chosen)


def _draw_line(axes: "Axes", picture: Picture, line: Line) -> None:
    x, y = [x for x, _ in line.points], [y for _, y in line.points]
    if line.style == "ideal":
        axes.plot(x, y, color=MUTED, linewidth=1.2, linestyle=(0, (1.2, 2.6)), zorder=2)
        return
    colour = _LINES[line.colour % COLOURS_THERE]
    if line.band:
        lows, highs = [low for _, low, _ in line.band], [high for *_, high in line.band]
        axes.fill_between(
            [x for x, *_ in line.band], lows, highs, color=colour, alpha=0.14, linewidth=0, zorder=1
        )
    # Predicted lines are thin and dashed, with empty dots, and behind the measured ones.
    predicted = line.style == "predicted"
    usual = (0, (4, 3)) if predicted else (0, (6, 2)) if line.again else "-"
    dots = picture.across == "workers" or len(x) == 1
    axes.plot(
        x,
        y,
        label=f"{line.label}, predicted" if predicted else line.label,
        color=colour,
        linewidth=1.4 if predicted else 1.9,
        linestyle=_in_turn(picture, line) if line.see_through else usual,
        marker="o" if dots else "",
        markersize=4 if predicted else 5,
        markerfacecolor=PAPER if predicted else colour,
        zorder=3 if predicted else 4,
        solid_joinstyle="round",
        clip_on=picture.across != "workers",
    )
    _draw_spreads(axes, line.spreads, colour)


def _in_turn(picture: Picture, line: Line) -> tuple[float, tuple[float, float]]:
    """Give the dashes of a line: where it and others go the same way each has its turn."""
    others = [each for each in picture.lines if each.see_through]
    turn = 1 + others.index(line)
    return _DASH * (1 + len(others) - turn), (_DASH, _DASH * len(others))


def _draw_spreads(axes: "Axes", spreads: Sequence[Interval], colour: str) -> None:
    for x, low, high in spreads:
        if high > low:
            axes.plot([x, x], [low, high], color=colour, linewidth=4, alpha=0.35, zorder=3)


def _scale_up(axes: "Axes", picture: Picture) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    if picture.log_up:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        # The more decades there are, the fewer ticks in each.
        digits = next(chosen for most, chosen in _DIGITS if high / low <= most)
        axes.yaxis.set_major_locator(LogLocator(base=10, subs=digits, numticks=6))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    if picture.from_zero:
        axes.set_ylim(0, 1.06 * _highest(picture))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda v, _: f"{100 * v:.6g} %" if picture.percent else short(v))
    )


def short(value: float) -> str:
    """Write the number of a tick in seven characters at most: `12,500`, `120 k`, `3.2 M`."""
    for unit, factor in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= max(factor, 1e5):
            return f"{value / factor:.4g} {unit}"
    return plain(value)


def _highest(picture: Picture) -> float:
    values = [y for line in picture.lines for _, y in line.points]
    values += [high for line in picture.lines for *_, high in (*line.spreads, *line.band)]
    highest = max(values, default=0.0)
    return highest if highest > 0 else 1.0


def _scale_across(axes: "Axes", picture: Picture) -> None:
    from matplotlib.ticker import NullLocator

    if picture.across == "workers":
        places = [(float(n), f"{n:,}") for n in picture.marked]
        _limit_workers(axes, picture)
    else:
        low, high = _limit_other(axes, picture)
        places = _factors(picture, low, high) if picture.wide else _steps(axes, picture, high)
        if len(places) < 2:  # one tick alone gives no scale
            places = _amounts(axes, " s" if picture.across == "time" else "")
    axes.xaxis.set_minor_locator(NullLocator())
    points = [(_points_across(axes, picture, place), label) for place, label in places]
    shown = choose_labels(points)
    axes.set_xticks([places[i][0] for i in shown], [places[i][1] for i in shown])
    if picture.across == "workers":
        axes.tick_params(axis="x", length=3, color=LINE)


def _limit_workers(axes: "Axes", picture: Picture) -> None:
    first, last = (picture.marked[0], picture.marked[-1]) if picture.marked else (1, 1)
    if picture.wide:
        axes.set_xscale("log", base=2)
        margin = (last / first) ** 0.03
        axes.set_xlim(first / margin, last * margin)
    else:
        margin = 0.04 * (last - first) if last > first else 1.0
        axes.set_xlim(first - margin, last + margin)


def _limit_other(axes: "Axes", picture: Picture) -> tuple[float, float]:
    known = [x for line in picture.lines for x, _ in line.points if x > 0]
    known += [event.place for event in picture.events if event.place > 0]
    low, high = (min(known), max(known)) if known else (1.0, 1.0)
    if picture.wide:
        axes.set_xscale("log")
        axes.set_xlim(low / 1.1, high * 1.1)
    else:
        axes.set_xlim(0, 1.02 * high)
    return low, high


def _factors(picture: Picture, low: float, high: float) -> list[tuple[float, str]]:
    """Round places on an axis that goes by factors."""
    if picture.across == "time":
        round_s = [t for t in _ROUND_S if low <= t <= high]
        if len(round_s) < 2:
            round_s = [t for t in choose_times(high, most=5) if t >= low]
        return [(float(t), clock(t)) for t in round_s]
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    places = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
    return [(place, short(place)) for place in places if low <= place <= high]


def _steps(axes: "Axes", picture: Picture, high: float) -> list[tuple[float, str]]:
    if picture.across == "time":
        return [(float(time_s), clock(time_s)) for time_s in choose_times(high, most=5)]
    return _amounts(axes)


def _amounts(axes: "Axes", unit: str = "") -> list[tuple[float, str]]:
    from matplotlib.ticker import MaxNLocator

    low, high = axes.get_xlim()
    whole = not unit  # steps and samples
    ticks = MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10], integer=whole).tick_values(low, high)
    return [(float(tick), short(float(tick)) + unit) for tick in ticks if low <= tick <= high]


def _points_across(axes: "Axes", picture: Picture, place: float) -> float:
    """Where a value stands across the picture, in points."""
    low, high = axes.get_xlim()
    if picture.wide:
        low, high, place = math.log(low), math.log(high), math.log(place)
    left, right, *_ = _MARGINS
    return (WIDTH - left - right) * (place - low) / (high - low)
