"""Stacked bars: where the time of a step and of an epoch goes, a bar for each size."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from paceline.options.figures import show_seconds, show_whole_percent
from paceline.options.text import cut
from paceline.report.scaling.captions import FIXED_NAMES, PART_NAMES, describe_fixed, describe_steps
from paceline.report.scaling.series import one_worker, size_name
from paceline.report.svg import COLOURS, MUTED, figure_to_svg, make_axes, plain
from paceline.results.study import SizeResult, Study

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH = 420.0  # Points of the view box, as of the pictures beside.
_ROW, _TOP, _BOTTOM = 26.0, 8.0, 30.0
_LETTER = 6.9  # The width of a letter where the page is narrow and text is largest.
_LONGEST = 24
_UNKNOWN = "unknown"
_WHOLE = ("compute", "steps")

_STAND_INS = {
    f"#0f00{place:02x}": f"var(--p-{name})"
    for place, name in enumerate([*PART_NAMES, *FIXED_NAMES, _UNKNOWN, *_WHOLE], 16)
}
_PLACES = {name[len("var(--p-") : -1]: colour for colour, name in _STAND_INS.items()}


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One bar: a size of a study, or what a run's time is looked at by."""

    label: str
    parts: Mapping[str, float]
    """Seconds by the name of the part; empty where they weren't measured."""
    end: str
    """What stands behind it."""


@dataclass(frozen=True, kw_only=True)
class BarPicture:
    """Bars of the same parts, one under another."""

    slug: str
    """Unique on the page; prefixes the ids inside the picture."""
    title: str
    caption: str
    bars: tuple[Bar, ...]
    names: Mapping[str, str]
    """Each part's name on the page, in their order along a bar."""
    mark_s: float | None = None
    """Where to draw a dotted line: one worker's step."""

    @property
    def legend(self) -> tuple[tuple[str, str], ...]:
        """The parts that any bar has, with their names."""
        seen = {name for bar in self.bars for name, time_s in bar.parts.items() if time_s > 0}
        return tuple((name, label) for name, label in self.names.items() if name in seen)

    @property
    def description(self) -> str:
        """The picture in one sentence, for those who don't see it."""
        sentences = []
        for bar in self.bars:
            parts = [f"{self.names[n]} {show_seconds(t)}" for n, t in bar.parts.items() if t > 0]
            inside = f" ({', '.join(parts)})" if parts else ""
            sentences.append(f"{bar.label}: {bar.end}{inside}")
        return f"{self.title}. {'; '.join(sentences)}"


def step_picture(study: Study) -> BarPicture:
    """Make the picture of where a step's time goes, a bar for each size that was measured."""
    alone = one_worker(study)
    compared = study.mode == "weak" and alone is not None and len(study.measured) > 1
    return BarPicture(
        slug="step",
        title="Time of a step",
        caption=describe_steps(study),
        bars=tuple(_step_bar(study, size) for size in study.measured),
        names=PART_NAMES | {_UNKNOWN: "not told apart"},
        mark_s=alone.step_s.median if compared and alone and alone.step_s else None,
    )


def fixed_picture(study: Study) -> BarPicture | None:
    """Make the picture of an epoch's fixed costs; None where they were measured for no size."""
    if all(size.fixed.total_s is None for size in study.measured):
        return None
    return BarPicture(
        slug="fixed",
        title="Fixed cost of an epoch",
        caption=describe_fixed(study),
        bars=tuple(_fixed_bar(study, size) for size in study.measured),
        names=FIXED_NAMES,
    )


def draw_bars(picture: BarPicture) -> str:
    """Draw the bars as inline SVG; the same picture always gives the same text."""
    labels = [cut(bar.label, _LONGEST) for bar in picture.bars]
    left = 10 + _LETTER * max(map(len, labels), default=0)
    right = 12 + _LETTER * max((len(bar.end) for bar in picture.bars), default=0)
    height = _TOP + _BOTTOM + _ROW * len(picture.bars)
    figure, axes = make_axes(WIDTH, height, (left, right, _TOP, _BOTTOM))
    for row, bar in enumerate(picture.bars):
        _draw_bar(axes, row, bar)
    if picture.mark_s is not None:
        axes.axvline(picture.mark_s, color=MUTED, linewidth=1.2, linestyle=(0, (1.2, 2.6)))
    _scale(axes, picture)
    axes.set_yticks(range(len(labels)), labels)
    for label in axes.get_yticklabels():
        label.set_parse_math(False)  # A "$" in a method's name is a dollar.
    colours = COLOURS | _STAND_INS
    return figure_to_svg(figure, slug=picture.slug, label=picture.description, colours=colours)


def _step_bar(study: Study, size: SizeResult) -> Bar:
    end = "not measured" if size.step_s is None else show_seconds(size.step_s.median)
    parts = {} if size.parts is None else asdict(size.parts)
    if size.parts is None and size.step_s is not None:
        parts = {_UNKNOWN: size.step_s.median}
    return Bar(label=size_name(study, size), parts=parts, end=end)


def _fixed_bar(study: Study, size: SizeResult) -> Bar:
    share = size.fixed_share
    known = {name: value for name, value in asdict(size.fixed).items() if value is not None}
    end = show_seconds(size.fixed.total_s) if known else "not measured"
    if share is not None:
        end = f"{end}, {show_whole_percent(share)}"
    return Bar(label=size_name(study, size), parts=known, end=end)


def _draw_bar(axes: "Axes", row: int, bar: Bar) -> None:
    start = 0.0
    for name, time_s in bar.parts.items():
        if time_s > 0:
            axes.barh(row, time_s, left=start, height=0.62, color=_PLACES[name], linewidth=0)
        start += time_s
    axes.annotate(
        bar.end,
        (start, row),
        xytext=(6, 0),
        textcoords="offset points",
        va="center_baseline",
        color=MUTED,
        annotation_clip=False,
        parse_math=False,
    )


def _scale(axes: "Axes", picture: BarPicture) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    longest = max((sum(bar.parts.values()) for bar in picture.bars), default=0.0)
    longest = max(longest, picture.mark_s or 0.0)
    axes.set_xlim(0, longest if longest > 0 else 1.0)
    axes.set_ylim(len(picture.bars) - 0.5, -0.5)
    axes.grid(visible=False)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4, steps=[1, 2, 2.5, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _tick(v, longest)))


def _tick(time_s: float, longest_s: float) -> str:
    return f"{plain(1000 * time_s)} ms" if longest_s < 0.4 else f"{plain(time_s)} s"
