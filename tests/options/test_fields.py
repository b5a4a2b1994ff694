from dataclasses import dataclass
from typing import Literal

import pytest

from paceline.errors import UsageError
from paceline.options.fields import (
    check_names,
    closest_names,
    fits,
    option_fields,
    unknown_name,
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """Some options."""

    width: int = 3
    """How wide,
    in pixels."""

    name: str | None = None
    """What it is called."""


def test_fields_with_their_docstrings() -> None:
    width, name = option_fields(Options, "Shape")
    assert (width.name, width.annotation, width.default) == ("width", int, 3)
    assert (width.help, width.group) == ("How wide, in pixels.", "Shape")
    assert (name.annotation, name.default) == (str | None, None)


def test_a_field_needs_a_default_and_a_docstring() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Undescribed:
        width: int = 3

    @dataclass(frozen=True, kw_only=True)
    class Required:
        width: int
        """How wide."""

    for component in (Undescribed, Required):
        with pytest.raises(TypeError, match="width needs a default and a docstring"):
            option_fields(component, "Shape")


def test_unknown_names() -> None:
    check_names(["a"], ["b", "a"], "letter")
    with pytest.raises(UsageError, match=r"^unknown letter 'c'\. Known: a, b$"):
        check_names(["a", "c"], ["b", "a"], "letter")
    assert unknown_name("widthh", ["width", "name"], "option") == (
        "unknown option 'widthh'. Did you mean 'width'? Known: name, width"
    )


@pytest.mark.parametrize(
    ("given", "likely"),
    [
        ("--epoch", ["--epochs"]),
        ("--max-epochs", ["--epochs"]),
        ("--warmup", ["--warmup-epochs", "--warmup-steps"]),
        ("--workers_num", []),
        ("--learning-rate", ["--lr"]),
        ("--image-size", []),
        ("--lr-scalin", ["--lr-scaling"]),
        ("--batch", ["--base-batch", "--batch-per-worker", "--global-batch"]),
    ],
)
@pytest.mark.core_cases(8)
def test_likely_names(given: str, likely: list[str]) -> None:
    known = (
        "--epochs --warmup-epochs --warmup-steps --image --hang-after-s --lr --lr-scaling "
        "--global-batch --base-batch --batch-per-worker --max-batch-per-worker"
    )
    assert closest_names(given, known.split()) == likely


def test_a_long_list_of_names_is_elsewhere() -> None:
    many = [f"name-{number}" for number in range(50)]
    assert unknown_name("x", many, "option", all_in="--help-all lists all") == (
        "unknown option 'x'. --help-all lists all"
    )


@pytest.mark.parametrize(
    ("value", "annotation", "expected"),
    [
        (3, int, True),
        (2.5, int, False),
        (True, int, False),
        (3, float, True),
        ("no", bool, False),
        (None, int | None, True),
        ("bf16", Literal["fp32", "bf16"], True),
        ("float32", Literal["fp32", "bf16"], False),
        ((0.9, 0.99), tuple[float, float] | None, True),
        ((0.9,), tuple[float, float], False),
        (("a", "b", "c"), tuple[str, ...], True),
    ],
)
def test_values_fit_their_type(value: object, annotation: object, expected: bool) -> None:
    assert fits(value, annotation) is expected


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--gpus", "--workers"),
        ("--nproc_per_node", "--workers"),
        ("--cpu", "--device"),
        ("--max-grad-norm", "--clip-norm"),
        ("wandb", None),
    ],
)
def test_names_of_other_tools_are_known(given: str, meant: str | None) -> None:
    known = ["--workers", "--gpus-per-node", "--device", "--node-cpu", "--clip-norm"]
    assert closest_names(given, known) == ([meant] if meant else [])


def test_names_of_other_tools_stand_for_options_that_there_are() -> None:
    from paceline.options import fields as module
    from paceline.training.config import training_options

    named = {name.replace("_", "-") for name in training_options()}
    assert set(module._ELSEWHERE.values()) - named == {"data-dir", "run-dir"} - named
    assert not set(module._ELSEWHERE) & named
