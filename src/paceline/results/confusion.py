"""`evaluation/confusion.json`: which classes a model takes for which. Imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Self, final

from paceline.files import write_json
from paceline.options.text import cut
from paceline.results.json_object import JsonObject, read_object, text, texts

_LABEL_LENGTH = 16


@dataclass(frozen=True, kw_only=True)
class ClassFigures:
    """How well one class is told from the others; None where nothing can be divided by."""

    name: str
    samples: int
    precision: float | None
    """Of the answers that named this class, the share that was right."""
    recall: float | None
    """Of the class's samples, the share that was found: its accuracy."""
    f1: float | None
    """The harmonic mean of both."""


@final
@dataclass(frozen=True, kw_only=True)
class Confusion:
    """A confusion matrix."""

    classes: tuple[str, ...]
    """Distinct names."""
    counts: tuple[tuple[int, ...], ...]
    """Rows are the truth, columns the answers; as many of each as classes."""
    snapshot: str = ""
    """The snapshot that was evaluated; empty where nothing says so."""

    @cached_property
    def samples(self) -> int:
        """All that were evaluated."""
        return sum(map(sum, self.counts))

    @cached_property
    def right(self) -> int:
        """Those of them that were answered right."""
        return sum(row[number] for number, row in enumerate(self.counts))

    @cached_property
    def per_class(self) -> tuple[ClassFigures, ...]:
        """The figures of each class, in the order of the classes."""
        answers = [sum(column) for column in zip(*self.counts, strict=True)]
        return tuple(
            _figures(name, row[number], sum(row), answers[number])
            for number, (name, row) in enumerate(zip(self.classes, self.counts, strict=True))
        )

    @property
    def mean(self) -> ClassFigures:
        """The means over the classes that have the figure, each class counting the same."""
        return ClassFigures(
            name="mean",
            samples=self.samples,
            precision=_mean([each.precision for each in self.per_class]),
            recall=_mean([each.recall for each in self.per_class]),
            f1=_mean([each.f1 for each in self.per_class]),
        )

    def mistakes(self) -> list[tuple[int, int, int]]:
        """List how often each class was taken for each other one: count, truth, answer."""
        return [
            (count, truth, answer)
            for truth, row in enumerate(self.counts)
            for answer, count in enumerate(row)
            if count and truth != answer
        ]

    def write(self, path: Path) -> None:
        """Write it as JSON, whole or not at all.

        Raises:
            OSError: The file can't be written.
        """
        per_class = self.per_class
        content = {
            "snapshot": self.snapshot,
            "classes": list(self.classes),
            "counts": [list(row) for row in self.counts],
            "per_class_accuracy": {each.name: each.recall for each in per_class},
            "per_class_precision": {each.name: each.precision for each in per_class},
            "per_class_f1": {each.name: each.f1 for each in per_class},
        }
        write_json(path, content)

    @classmethod
    def read(cls, path: Path, problems: list[str]) -> Self | None:
        """Read what `write` wrote; None where there is none.

        Args:
            problems: Gets a sentence where it can't be read.
        """
        content = read_object(path, problems)
        if not content:
            return None
        classes, counts = texts(content, "classes"), _counts(content)
        if (
            not classes
            or counts is None
            or [len(row) for row in counts] != [len(classes)] * len(classes)
        ):
            problems.append(f"{path.name} should hold as many rows of counts as it names classes")
            return None
        return cls(classes=classes, counts=counts, snapshot=text(content, "snapshot"))


def _counts(content: JsonObject) -> tuple[tuple[int, ...], ...] | None:
    rows = content.get("counts")
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        return None
    if not all(type(count) is int and 0 <= count < 1 << 53 for row in rows for count in row):
        return None
    return tuple(tuple(row) for row in rows)


def _figures(name: str, right: int, samples: int, answers: int) -> ClassFigures:
    both = samples + answers
    return ClassFigures(
        name=name,
        samples=samples,
        precision=right / answers if answers else None,
        recall=right / samples if samples else None,
        f1=2 * right / both if both else None,
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def strength(count: int, row: Sequence[int]) -> float:
    """Say how strongly a cell is coloured: the root of its share of the row, 0 to 1.

    The root, so that one mistake in a hundred can be seen.
    """
    return math.sqrt(count / max(sum(row), 1))


def shorten(name: str) -> str:
    """Make a class name fit beside the matrix, on one line."""
    line = " ".join("".join(c if c.isprintable() else " " for c in name).split())
    return cut(line, _LABEL_LENGTH)
