"""The confusion matrix's numbers, and a picture of a sane size for any number of classes."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from paceline.report.confusion import distinct, draw_confusion, write_confusion
from paceline.results.confusion import shorten


def matrix_of(classes: int) -> np.ndarray:
    generator = np.random.default_rng(classes)
    matrix = generator.poisson(0.3, (classes, classes))
    matrix[np.diag_indices(classes)] += 40
    return matrix.astype(np.int64)


def test_json(tmp_path: Path) -> None:
    matrix = np.array([[8, 2, 0], [0, 0, 0], [1, 0, 3]])
    write_confusion(matrix, ["a", "b", "c"], tmp_path / "c.png", tmp_path / "c.json", "step-1")
    assert json.loads((tmp_path / "c.json").read_text()) == {
        "snapshot": "step-1",
        "classes": ["a", "b", "c"],
        "counts": matrix.tolist(),
        "per_class_accuracy": {"a": 0.8, "b": None, "c": 0.75},
        "per_class_precision": {"a": 8 / 9, "b": 0.0, "c": 1.0},
        "per_class_f1": {"a": 16 / 19, "b": 0.0, "c": 6 / 7},
    }


@pytest.mark.parametrize("classes", [2, 21])
@pytest.mark.core_cases(2)
def test_picture(tmp_path: Path, classes: int) -> None:
    names = [f"class number {n}" for n in range(classes)]
    path = tmp_path / "c.png"
    path.write_bytes(draw_confusion(matrix_of(classes), names))
    pixels = imread(path)[..., :3]
    height, width, _ = pixels.shape
    assert 500 <= width <= 1700
    assert math.isclose(width, height)
    blue = np.abs(pixels - np.array([11, 92, 173]) / 255).max(axis=-1) < 0.3
    assert blue.mean() > 0.5 / classes / 4  # The diagonal.


def test_the_picture_is_deterministic() -> None:
    assert draw_confusion(matrix_of(5), list("abcde")) == draw_confusion(
        matrix_of(5), list("abcde")
    )


@pytest.mark.parametrize(
    "names", [["$x", "y$"], ["犬", "猫"], ["a\nb", "\\frac{"], ["", " "], ["<b>", "&amp;"]]
)
def test_names_of_any_kind(tmp_path: Path, names: list[str]) -> None:
    write_confusion(np.eye(2, dtype=np.int64), names, tmp_path / "c.png", tmp_path / "c.json")
    assert json.loads((tmp_path / "c.json").read_text())["classes"] == names


def test_an_empty_matrix_can_be_drawn() -> None:
    assert draw_confusion(np.zeros((3, 3), dtype=np.int64), list("abc"))


def test_equal_names_are_numbered() -> None:
    assert distinct(["cat", "dog", "cat", "cat"]) == ["cat", "dog", "cat (2)", "cat (3)"]
    assert distinct(["a (2)", "a", "a"]) == ["a (2)", "a", "a (3)"]


def test_long_names_are_shortened() -> None:
    assert shorten("tabby, tabby cat, domestic") == "tabby, tabby ca…"
    assert shorten(" two\nlines ") == "two lines"


@pytest.mark.parametrize("matrix", [np.zeros((2, 3)), np.zeros(4), -np.eye(2)])
def test_what_is_no_confusion_matrix_is_refused(tmp_path: Path, matrix: np.ndarray) -> None:
    with pytest.raises(ValueError, match="matrix"):
        write_confusion(matrix, ["a", "b"], tmp_path / "c.png", tmp_path / "c.json")
