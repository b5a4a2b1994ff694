"""Precision, recall and F1 as scikit-learn has them, and a file that may be old or damaged."""

import json
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import precision_recall_fscore_support

from paceline.results.confusion import Confusion

COUNTS = ((8, 2, 0, 0), (0, 0, 0, 0), (1, 0, 3, 0), (2, 5, 1, 0))


def confusion(counts: tuple[tuple[int, ...], ...] = COUNTS) -> Confusion:
    names = tuple(f"class {n}" for n in range(len(counts)))
    return Confusion(classes=names, counts=counts, snapshot="step-000000000023")


def test_the_figures_are_those_of_scikit_learn() -> None:
    counts = np.array(COUNTS)
    truth, answers = np.nonzero(counts)
    repeats = counts[truth, answers]
    expected = precision_recall_fscore_support(
        truth.repeat(repeats), answers.repeat(repeats), labels=range(4), zero_division=np.nan
    )
    found = confusion().per_class
    for name, values in zip(("precision", "recall", "f1", "samples"), expected, strict=True):
        ours = [getattr(each, name) for each in found]
        assert [np.nan if v is None else v for v in ours] == pytest.approx(
            list(values), nan_ok=True
        )
    assert found[1].recall is None  # there was no such sample
    assert found[3].precision is None  # nothing was taken for it


def test_means_count_each_class_the_same() -> None:
    mean = confusion(((90, 10), (1, 1))).mean
    assert mean.recall == pytest.approx((0.9 + 0.5) / 2)
    assert mean.samples == 102


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path, problems = tmp_path / "confusion.json", list[str]()
    confusion().write(path)
    assert Confusion.read(path, problems) == confusion()
    assert problems == []


@pytest.mark.parametrize("counts", [None, [], [[1]], [[1, 2], [3]], [[1, -1], [0, 0]], [[1, "2"]]])
def test_what_is_no_matrix_is_a_problem(tmp_path: Path, counts: object) -> None:
    path, problems = tmp_path / "confusion.json", list[str]()
    path.write_text(json.dumps({"classes": ["a", "b"], "counts": counts}))
    assert Confusion.read(path, problems) is None
    assert len(problems) == 1


def test_none_is_no_problem(tmp_path: Path) -> None:
    problems: list[str] = []
    assert Confusion.read(tmp_path / "confusion.json", problems) is None
    assert problems == []
