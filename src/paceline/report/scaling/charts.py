"""Which lines the pictures of a study have: pure choices, no drawing."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from paceline.options import figures
from paceline.options.figures import plural
from paceline.report.charts import MAX_POINTS, spans_decades, thin
from paceline.report.scaling.captions import (
    describe_efficiency,
    describe_learning,
    describe_throughput,
)
from paceline.report.scaling.convergence import loss_kind, loss_of, trained_sizes
from paceline.report.scaling.series import (
    Method,
    efficiency,
    find_methods,
    method_name,
    one_worker,
    size_name,
)
from paceline.results.study import CurvePoint, PredictedSize, SizeResult, Study

COLOURS_THERE = 8
"""Colours of the page for lines beside each other; more lines begin again, dashed."""

MAX_BANDS = 3
"""With more methods, bands of those that weren't measured would hide each other."""

LineStyle = Literal["measured", "predicted", "ideal"]
Across = Literal["workers", "time", "samples", "step"]
_LEARNING: dict[Across, str] = {"time": "training time", "samples": "samples seen"}
_STYLES: tuple[LineStyle, ...] = ("measured", "predicted", "ideal")
Interval = tuple[float, float, float]
"""Where it is across, its lower and its upper end."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One line of a picture."""

    label: str
    value: str
    """The last value as text, for the legend."""
    colour: int
    """From 0, of the page's colours."""
    points: tuple[tuple[float, float], ...]
    style: LineStyle = "measured"
    spreads: tuple[Interval, ...] = ()
    """Lines up and down at the points."""
    band: tuple[Interval, ...] = ()
    see_through: bool = False
    """Dashed in turns with others, so that all of those that go the same way can be seen."""

    @property
    def again(self) -> bool:
        """Whether it is dashed, also since another line has the same colour."""
        return self.see_through or self.colour >= COLOURS_THERE


@dataclass(frozen=True, kw_only=True)
class Event:
    """A line up and down where something happened."""

    place: float
    label: str
    is_fault: bool = False


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Lines over workers, time or samples, and the sentence above them."""

    slug: str
    """Unique on the page; prefixes the ids inside the picture."""
    title: str
    caption: str
    across: Across
    lines: tuple[Line, ...]
    percent: bool = False
    from_zero: bool = False
    marked: tuple[int, ...] = ()
    """Numbers of workers to write along the bottom."""
    wide: bool = False
    """Across by factors instead of differences, where it spans that much."""
    log_up: bool = False
    events: tuple[Event, ...] = ()

    @property
    def legend(self) -> tuple[Line, ...]:
        """The lines that have to be named: measured ones, what is only predicted, and ideal."""
        named = {line.label for line in self.lines if line.style == "measured"}
        lines = [ln for ln in self.lines if ln.style != "predicted" or ln.label not in named]
        return tuple(sorted(lines, key=lambda line: _STYLES.index(line.style)))

    @property
    def predicted(self) -> bool:
        """Whether any line is a prediction."""
        return any(line.style == "predicted" for line in self.lines)

    @property
    def description(self) -> str:
        """The picture in one sentence, for those who don't see it."""
        sentences = [
            f"{self._name(line)}: {self._describe_points(line)}"
            for line in self.lines
            if line.points
        ]
        sentences += [event.label for event in self.events]
        return f"{self.title}. {'; '.join(sentences)}"

    def _name(self, line: Line) -> str:
        return f"{line.label}, predicted" if line.style == "predicted" else line.label

    def _describe_points(self, line: Line) -> str:
        write = figures.show_whole_percent if self.percent else _four_digits
        if self.across == "workers":
            return ", ".join(f"{write(y)} at {x:,.0f}" for x, y in line.points)
        return f"from {write(line.points[0][1])} to {write(line.points[-1][1])}"


def throughput_picture(study: Study) -> Picture:
    """Images a second against workers, with the line that one worker's throughput would give."""

    def low_high(size: PredictedSize) -> tuple[float, float, float] | None:
        """Scale the efficiency's band, which is proportional to the throughput."""
        if size.images_per_s is None:
            return None
        factor = size.images_per_s / size.efficiency
        return factor * size.low, size.images_per_s, factor * size.high

    methods = find_methods(study)
    lines = [
        *_predicted(methods, low_high),
        *_measured(study, methods, _throughput, figures.show_three_digits),
    ]
    baseline, workers = study.baseline_images_per_s, _workers(study)
    if baseline is not None and len(workers) > 1:
        lines.insert(0, _ideal(workers, lambda n: n * baseline))
    return Picture(
        slug="throughput",
        title="Images a second",
        caption=describe_throughput(study),
        across="workers",
        lines=tuple(lines),
        marked=workers,
        wide=_wide(workers),
        log_up=_wide(workers),
        from_zero=not _wide(workers),
    )


def efficiency_picture(study: Study) -> Picture:
    """Efficiency against workers, with what is predicted."""
    methods, workers = find_methods(study), _workers(study)
    lines = [
        *_predicted(methods, lambda size: (size.low, size.efficiency, size.high)),
        *_measured(
            study, methods, lambda size: _efficiency(study, size), figures.show_whole_percent
        ),
    ]
    if len(workers) > 1:
        lines.insert(0, _ideal(workers, lambda n: 1.0))
    return Picture(
        slug="efficiency",
        title="Efficiency",
        caption=describe_efficiency(study),
        across="workers",
        lines=tuple(lines),
        marked=workers,
        wide=_wide(workers),
        percent=True,
        from_zero=True,
    )


def learning_pictures(study: Study) -> tuple[Picture, ...]:
    """Loss against time and against samples; none where nothing was trained."""
    pictures = []
    for number, (name, sizes) in enumerate(_learning_groups(study)):
        for across in _LEARNING:
            picture = _learning_picture(study, across, sizes, name)
            pictures.append(replace(picture, slug=f"loss-{across}-{number}"))
    return tuple(picture for picture in pictures if any(line.points for line in picture.lines))


def _learning_groups(study: Study) -> list[tuple[str, tuple[SizeResult, ...]]]:
    """Choose which trainings share a picture.

    Where there are more than colours, the methods are compared at the most workers first; then each
    method has a picture of its own, beside one worker alone.
    """
    sizes = trained_sizes(study)
    methods = list(dict.fromkeys(method_name(study, s) for s in sizes if s.workers > 1))
    if len(sizes) <= COLOURS_THERE or len(methods) < 2:
        return [("", sizes)] if sizes else []
    most = max(size.workers for size in sizes)
    alone = tuple(size for size in sizes if size.workers == 1)
    groups = [(f", {plural(most, 'worker')}", tuple(s for s in sizes if s.workers in (1, most)))]
    for name in methods:
        own = tuple(s for s in sizes if s.workers > 1 and method_name(study, s) == name)
        groups.append((f", {name}", (*alone, *own)))
    return groups


def _learning_picture(
    study: Study, across: Across, sizes: tuple[SizeResult, ...], name: str
) -> Picture:
    kind = loss_kind(study)
    lines = _loss_lines(study, sizes, across)
    return Picture(
        slug="loss",
        title=f"{kind.capitalize()} loss by {_LEARNING[across]}{name}",
        caption=describe_learning(study, sizes, across),
        across=across,
        lines=lines,
        wide=_lengths_differ(lines),
        log_up=spans_decades([y for line in lines for _, y in line.points]),
    )


def _ideal(workers: tuple[int, ...], reach: Callable[[int], float]) -> Line:
    ends = tuple((float(n), reach(n)) for n in (workers[0], workers[-1]))
    return Line(label="ideal", value="", colour=0, points=ends, style="ideal")


def _measured(
    study: Study,
    methods: tuple[Method, ...],
    reach: Callable[[SizeResult], Interval | None],
    write: Callable[[float | None], str],
) -> list[Line]:
    lines = []
    several = sum(bool(method.sizes) for method in methods) > 1
    for method in methods:
        reached = [(float(size.workers), reach(size)) for size in method.sizes]
        known = [(workers, *interval) for workers, interval in reached if interval is not None]
        if known:
            line = Line(
                label=method.label if several else "measured",
                value=write(known[-1][2]),
                colour=method.place,
                points=tuple((workers, middle) for workers, _, middle, _ in known),
                spreads=tuple((workers, low, high) for workers, low, _, high in known),
            )
            lines.append(line)
    return lines


def _predicted(
    methods: tuple[Method, ...], reach: Callable[[PredictedSize], Interval | None]
) -> list[Line]:
    lines = []
    one = sum(bool(method.sizes) for method in methods) < 2
    for method in methods:
        reached = [(float(size.workers), reach(size)) for size in method.predicted]
        known = [(workers, *interval) for workers, interval in reached if interval is not None]
        # Bands of many methods would hide one another.
        banded = bool(method.sizes) or len(methods) <= MAX_BANDS
        if known:
            line = Line(
                label="measured" if method.sizes and one else method.label,
                value="",
                colour=method.place,
                points=tuple((workers, middle) for workers, _, middle, _ in known),
                band=tuple((n, low, high) for n, low, _, high in known) if banded else (),
                style="predicted",
            )
            lines.append(line)
    return lines


def _throughput(size: SizeResult) -> Interval | None:
    spread = size.images_per_s
    return None if spread is None else (spread.low, spread.median, spread.high)


def _efficiency(study: Study, size: SizeResult) -> Interval | None:
    if size.efficiency is not None:
        return size.efficiency.low, size.efficiency.median, size.efficiency.high
    share = efficiency(study, size)
    return None if share is None else (share, share, share)


def _workers(study: Study) -> tuple[int, ...]:
    """All numbers of workers, measured and predicted, in growing order."""
    predicted = {} if study.predicted is None else study.predicted.methods
    found = {size.workers for size in study.measured}
    found |= {size.workers for sizes in predicted.values() for size in sizes}
    if one_worker(study) is None and study.baseline_images_per_s is not None and found:
        found.add(1)
    return tuple(sorted(found))


def _wide(workers: tuple[int, ...]) -> bool:
    return len(workers) > 1 and workers[-1] / workers[0] > 16


def _loss_lines(study: Study, sizes: tuple[SizeResult, ...], across: Across) -> tuple[Line, ...]:
    kind = loss_kind(study)
    lines = []
    names = _curve_names(study, sizes)
    for colour, size in enumerate(sizes):
        curve = () if size.trained is None else size.trained.curve
        both = [(_place(point, across), loss_of(point, kind)) for point in curve]
        known = [(x, y) for x, y in both if x is not None and y is not None]
        points = tuple(known[i] for i in thin(len(known), MAX_POINTS))
        value = figures.show_loss(points[-1][1]) if points else ""
        lines.append(Line(label=names[colour], value=value, colour=colour, points=points))
    return tuple(lines)


def _curve_names(study: Study, sizes: tuple[SizeResult, ...]) -> list[str]:
    methods = {method_name(study, size) for size in sizes if size.workers > 1}
    if len(methods) > 1:
        return [size_name(study, size) for size in sizes]
    return [plural(size.workers, "worker") for size in sizes]  # The title names the method.


def _place(point: CurvePoint, across: Across) -> float | None:
    return point.time_s if across == "time" else point.samples


def _lengths_differ(lines: tuple[Line, ...]) -> bool:
    """Whether the shortest curve would be a narrow strip at the side of the longest."""
    lengths = [line.points[-1][0] for line in lines if line.points]
    return bool(lengths) and 0 < 10 * min(lengths) < max(lengths)


def _four_digits(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
