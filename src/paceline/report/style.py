"""What all pictures of the pages have in common: the page's colours, quiet axes, plain numbers."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Stand-ins: figure_to_svg puts the page's colours in their place.
COLOURS = {
    "#0a0000": "var(--train)",
    "#0b0000": "var(--accent)",
    "#0c0000": "var(--muted)",
    "#0d0000": "var(--line)",
    "#0e0000": "var(--paper)",
}
TRAIN, ACCENT, MUTED, LINE, PAPER = COLOURS

Margins = tuple[float, float, float, float]
"""Left, right, top and bottom of the axes, in points."""


def make_axes(width: float, height: float, margins: Margins) -> "tuple[Figure, Axes]":
    """Make a figure of so many points with one pair of quiet axes in it, without pyplot."""
    from matplotlib.figure import Figure

    left, right, top, bottom = margins
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    figure.patch.set_visible(False)
    size = (1 - (left + right) / width, 1 - (top + bottom) / height)
    axes = figure.add_axes((left / width, bottom / height, *size))
    _quieten(axes)
    return figure, axes


def plain(value: float) -> str:
    """Write the number of a tick: thousands separated, six digits at most."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.6g}"


def _quieten(axes: "Axes") -> None:
    axes.patch.set_visible(False)
    for side in ("left", "right", "top"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set(color=LINE, linewidth=1)
    axes.tick_params(length=0, pad=6, colors=MUTED)
    axes.grid(axis="y", color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
