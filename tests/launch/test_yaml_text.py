from pathlib import PurePosixPath

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from paceline.launch.cluster import Plain
from paceline.launch.yaml_text import to_yaml

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.text(alphabet="ab \n:-#'\"1.~y", max_size=12),
)
VALUES: st.SearchStrategy[Plain] = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(VALUES)
def test_any_reader_reads_the_same(value: Plain) -> None:
    assert yaml.safe_load(to_yaml(value)) == value


@pytest.mark.parametrize(
    "text",
    ["yes", "No", "null", "~", "", "1e3", "0x10", "012", "1:30", "2026-11-21", "- a", "a: b"],
)
def test_texts_stay_texts_of_one_line(text: str) -> None:
    assert_kept(text)


@pytest.mark.parametrize(
    "text",
    ["a #b", "=", "<<", ".inf", "-", "a\n", "a\n\n", "\na\n", " a\n", "a \nb\n", "a\n  b\n", "é"],
)
def test_texts_stay_texts(text: str) -> None:
    assert_kept(text)


def assert_kept(text: str) -> None:
    value: Plain = {"a": text, text: [text, {text: text}]}
    assert yaml.safe_load(to_yaml(value)) == value


def test_it_reads_well() -> None:
    text = to_yaml(
        {"kind": "Job", "metadata": {"name": "a-1"}, "args": ["-c", "x y"], "run": "a\n  b\n"},
        {"nodes": 1, "empty": {}, "none": [], "deep": [{"a": 1, "b": [2]}]},
    )
    assert text == (
        'kind: Job\nmetadata:\n  name: a-1\nargs:\n- "-c"\n- x y\nrun: |\n  a\n    b\n---\n'
        "nodes: 1\nempty: {}\nnone: []\ndeep:\n- a: 1\n  b:\n  - 2\n"
    )
    assert len(list(yaml.safe_load_all(text))) == 2


def test_paths_need_no_quotes() -> None:
    path = str(PurePosixPath("/snapshots") / "runs" / "digits-1")
    assert to_yaml([path]) == f"- {path}\n"


@pytest.mark.parametrize("text", ["1e3", "1e-3", "0o17", "y", "N", "On"])
def test_what_some_readers_take_for_something_else_is_quoted(text: str) -> None:
    assert to_yaml([text]) == f'- "{text}"\n'
