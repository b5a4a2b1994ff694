"""Pictures of the pages: quiet axes, and a matplotlib figure as SVG with the page's colours."""

import io
import json
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Stand-ins: figure_to_svg puts the page's colours in their place.
COLOURS = {
    "#0a0000": "var(--train)",
    "#0b0000": "var(--accent)",
    "#0c0000": "var(--muted)",
    "#0d0000": "var(--line)",
    "#0e0000": "var(--paper)",
    "#100000": "var(--bad)",
}
TRAIN, ACCENT, MUTED, LINE, PAPER, BAD = COLOURS

_WHOLE = ("epoch", "step", "steps", "workers", "samples")
"""What is counted in whole numbers along the bottom."""

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


def name_axes(axes: "Axes", margins: Margins, *, across: str, up: str) -> None:
    """Write what is along the bottom at its right end, and what goes up above its upper end."""
    left, _, _, bottom = margins
    box = axes.get_window_extent()  # in points, since a figure of ours has 72 dots an inch
    axes.set_xlabel(across, ha="right", va="baseline", color=MUTED)
    axes.xaxis.set_label_coords(1, (4 - bottom) / box.height)
    axes.set_ylabel(up, rotation=0, ha="left", va="baseline", color=MUTED)
    axes.yaxis.set_label_coords(-left / box.width, 1 + 9 / box.height)


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


_REFERENCE = re.compile(r"#([\w-]+)")
_NUMBER = re.compile(r"-?\d+\.\d+")
_GEOMETRY = ("d", "x", "y", "width", "height", "transform", "points")


def figure_to_svg(figure: "Figure", *, slug: str, label: str, colours: Mapping[str, str]) -> str:
    """Turn a figure into SVG text that can stand in an HTML page.

    The same figure always gives the same text. Text stays text, in the page's font; the width
    follows the place where it stands; ids are unique as long as slugs are.

    Args:
        figure: A figure made without pyplot.
        slug: Prefix of all ids.
        label: What the picture shows, for those who don't see it.
        colours: The figure's hex colours (lower case) and what CSS should have in their place.
    """
    root = ElementTree.fromstring(_draw(figure, slug))
    # Make the markup small and safe to stand in a page beside others.
    _plain_names(root)
    _drop(root, {"metadata", "style"})
    _tidy_ids(root, slug)
    for element in root.iter():
        _restyle(element, colours)
        _round(element)
    # The root says only what the page and its script need.
    width, height = (float(n) for n in root.attrib["viewBox"].split()[2:])
    root.attrib.clear()
    if chart := _describe(figure, width, height, colours):
        root.attrib["data-chart"] = json.dumps(chart, separators=(",", ":"))
    root.attrib.update({"viewBox": f"0 0 {width:g} {height:g}", "role": "img", "aria-label": label})
    return ElementTree.tostring(root, encoding="unicode")


def _describe(
    figure: "Figure", width: float, height: float, colours: Mapping[str, str]
) -> dict[str, object]:
    """Say what the page's script needs to show values and to zoom: box, axes and labelled lines.

    Lines without a label of ours aren't listed. Empty where there is none, so that nothing can be
    shown.
    """
    axes = figure.axes[0]
    lines = [line for line in axes.get_lines() if not str(line.get_label()).startswith("_")]
    listed = [found for line in lines if (found := _points(line, colours))["x"]]
    if not listed:
        return {}
    # matplotlib: fractions of the figure, from below. SVG: points, from above.
    box = axes.get_position()
    place = (box.x0 * width, (1 - box.y1) * height, box.width * width, box.height * height)
    across = axes.get_xlabel()
    return {
        "box": [round(number, 2) for number in place],
        "x": _axis(axes.get_xlim(), axes.get_xscale(), across)
        | {"unit": " s" if "time" in across else "", "whole": across in _WHOLE},
        "y": _axis(axes.get_ylim(), axes.get_yscale(), axes.get_ylabel())
        | {"percent": axes.yaxis.get_major_formatter()(0.5, 0).endswith("%")},
        "lines": listed,
    }


def _axis(limits: tuple[float, float], scale: str, name: str) -> dict[str, object]:
    low, high = (float(f"{limit:.6g}") for limit in limits)
    return {"name": name, "low": low, "high": high, "log": scale == "log"}


def _points(line: "Line2D", colours: Mapping[str, str]) -> dict[str, object]:
    x, y = (np.asarray(line.get_data(orig=True)[i], float) for i in (0, 1))
    known = np.isfinite(x) & np.isfinite(y)
    colour = str(line.get_color())
    return {
        "label": str(line.get_label()),
        "colour": colours.get(colour, colour),
        "x": [_digits(value, 8) for value in x[known].tolist()],
        "y": [_digits(value, 5) for value in y[known].tolist()],
    }


def _digits(value: float, digits: int) -> float:
    """Round to as many digits as anybody reads; a whole number is written without a point."""
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def _draw(figure: "Figure", slug: str) -> str:
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": slug}):
        figure.savefig(buffer, format="svg", dpi=72, metadata={"Date": None})
    return buffer.getvalue()


def _plain_names(root: ElementTree.Element) -> None:
    """Drop XML namespaces: HTML's parser knows that what is inside `svg` is SVG."""
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        for name in [name for name in element.attrib if "}" in name]:
            element.attrib[name.rpartition("}")[2]] = element.attrib.pop(name)


def _drop(element: ElementTree.Element, tags: set[str]) -> None:
    for child in list(element):
        if child.tag in tags:
            element.remove(child)
        else:
            _drop(child, tags)


def _tidy_ids(root: ElementTree.Element, slug: str) -> None:
    """Keep the ids that something refers to, each with the prefix; drop the others."""
    used = {
        name
        for element in root.iter()
        for key, value in element.attrib.items()
        if key == "href" or "url(#" in value
        for name in _REFERENCE.findall(value)
    }
    for element in root.iter():
        identity = element.attrib.pop("id", "")
        if identity in used:
            element.attrib["id"] = f"{slug}-{identity}"
        for key, value in element.attrib.items():
            if key == "href" or "url(#" in value:
                element.attrib[key] = _REFERENCE.sub(rf"#{slug}-\1", value)


def _restyle(element: ElementTree.Element, colours: Mapping[str, str]) -> None:
    style = element.attrib.get("style")
    if style is None:
        return
    declarations = []
    for declaration in style.split(";"):
        name, _, value = (part.strip() for part in declaration.partition(":"))
        if name and not name.startswith("font"):  # The page's own font.
            declarations.append(f"{name}:{colours.get(value.lower(), value)}")
    element.attrib["style"] = ";".join(declarations)


def _round(element: ElementTree.Element) -> None:
    """Two decimals of a point are finer than any screen; more would only make the page larger."""
    for name in _GEOMETRY:
        if name in element.attrib:
            rounded = _NUMBER.sub(
                lambda n: f"{float(n[0]):.2f}".rstrip("0").rstrip("."), element.attrib[name]
            )
            element.attrib[name] = " ".join(rounded.split())
