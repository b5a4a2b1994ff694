"""A confusion matrix as a picture and as JSON: which classes a model takes for which."""

import io
import math
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from paceline.files import write_atomic
from paceline.options.figures import show_percent
from paceline.results.confusion import Confusion, shorten

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COUNTS_UP_TO = 20  # More classes than this leave no room for numbers in the cells.
_MAX_LABELS = 34

_RIGHT = np.array([11, 92, 173]) / 255
_WRONG = np.array([196, 66, 8]) / 255
_INK, _MUTED, _LINE = "#1a1d21", "#5b646d", "#c9cdcb"


def write_confusion(
    matrix: np.ndarray, class_names: Sequence[str], png: Path, json: Path, snapshot: str = ""
) -> Confusion:
    """Write a confusion matrix as PNG and JSON; called by one process, not a collective.

    In the picture a cell's strength is the root of its share of the row, so that one mistake in a
    hundred can be seen; right answers are blue, mistakes orange.

    Args:
        matrix: Counts, shape (classes, classes), integers; rows are the truth, columns the answers.
        class_names: One for each class; equal ones get a number.
        snapshot: The name of the snapshot that was evaluated.

    Returns:
        What the JSON holds.

    Raises:
        ValueError: The shape isn't (classes, classes) for the names given, or a count is negative.
        OSError: A file can't be written.
    """
    classes = len(class_names)
    if matrix.shape != (classes, classes) or classes == 0:
        raise ValueError(
            f"the matrix has shape {tuple(matrix.shape)}; {classes} class names need "
            f"({classes}, {classes}) and at least one class"
        )
    counts = matrix.astype(np.int64)
    if (counts < 0).any():
        raise ValueError("a confusion matrix holds counts; at least one is negative")
    names = distinct(class_names)
    confusion = Confusion(
        classes=tuple(names), counts=tuple(map(tuple, counts.tolist())), snapshot=snapshot
    )
    confusion.write(json)
    write_atomic(png, draw_confusion(counts, names))
    return confusion


def distinct(names: Sequence[str]) -> list[str]:
    """Number names that occur more than once: `cat`, `cat (2)`."""
    used = set(names)
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        candidate = name
        # A numbered name may be taken by another class's own.
        while seen[name] > 1 and candidate in used:
            candidate = f"{name} ({seen[name]})"
            seen[name] += candidate in used
        used.add(candidate)
        result.append(candidate)
    return result


def draw_confusion(counts: np.ndarray, names: Sequence[str]) -> bytes:
    """Draw the picture as PNG; the same numbers always give the same bytes.

    Args:
        counts: Shape (classes, classes), int64; rows are the truth.
    """
    from matplotlib.figure import Figure

    classes = len(names)
    side = min(max(2.2 + 0.36 * classes, 3.6), 9.5)  # inches
    figure = Figure(figsize=(side + 1.4, side + 1.4), dpi=150, facecolor="white", layout="tight")
    axes = figure.add_subplot()
    axes.imshow(_shades(counts), interpolation="nearest", aspect="equal")
    _label_classes(axes, names)
    if classes <= _COUNTS_UP_TO:
        _write_counts(axes, counts)
    # counts: (classes, classes); right answers are on the diagonal.
    total, right = int(counts.sum()), int(counts.diagonal().sum())
    share = f", {show_percent(right / total)} right" if total else ""
    axes.set_title(f"{total:,} samples{share}", color=_INK, fontsize=11, loc="left", pad=12)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A name in a script that the font lacks shows as boxes; the JSON has it whole.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        figure.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _strength(counts: np.ndarray) -> np.ndarray:
    """Root of each cell's share of its row, 0 to 1; (classes, classes)."""
    totals = np.maximum(counts.sum(axis=1, keepdims=True), 1)
    strength: np.ndarray = np.sqrt(counts / totals)
    return strength


def _shades(counts: np.ndarray) -> np.ndarray:
    """Colours on a 0 to 1 scale: (classes, classes, 3)."""
    strength = _strength(counts)[..., None]
    right = np.eye(len(counts), dtype=bool)[..., None]
    shades: np.ndarray = 1 - strength * (1 - np.where(right, _RIGHT, _WRONG))
    return shades


def _label_classes(axes: "Axes", names: Sequence[str]) -> None:
    every = math.ceil(len(names) / _MAX_LABELS)
    places = range(0, len(names), every)
    labels = [shorten(names[i]) for i in places]
    size = 9 if len(labels) <= 20 else 7
    upright = max(map(len, labels)) <= (3 if len(labels) <= 20 else 2)
    axes.set_xticks(places, labels, rotation=0 if upright else 90, fontsize=size)
    axes.set_yticks(places, labels, fontsize=size)
    for label in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        label.set_parse_math(False)  # A "$" in a name is a dollar.
    axes.tick_params(length=0, colors=_INK, pad=5)
    axes.set_xlabel("answer", color=_MUTED, fontsize=10, labelpad=8)
    axes.set_ylabel("truth", color=_MUTED, fontsize=10, labelpad=8)
    for spine in axes.spines.values():
        spine.set_color(_LINE)


def _write_counts(axes: "Axes", counts: np.ndarray) -> None:
    strength = _strength(counts)
    widest = len(f"{int(counts.max()):,}")
    size = max(5.0, min(9.0, 36 / widest))
    for (row, column), count in np.ndenumerate(counts):
        if count:
            colour = "white" if strength[row, column] > 0.6 else _INK
            axes.text(
                column, row, f"{count:,}", ha="center", va="center", fontsize=size, color=colour
            )
