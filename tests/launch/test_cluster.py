"""The command of each node, names, and what a patch changes."""

from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.launch.cluster import Plain, merged, read_patch
from tests.launch.cluster_jobs import a_job


def test_a_node_resumes_or_starts() -> None:
    assert a_job().words("/v/a", "--on", "node") == [
        *("train", "digits", "--epochs", "2", "--run-dir", "/v/a", "--resume", "--on", "node")
    ]
    script = a_job(command=("run", "train.py"), script_args=("--resume", "no"))
    assert script.words("/v/a")[-5:] == ["/v/a", "--resume", "--", "--resume", "no"]
    assert a_job(command=("resume",)).words("/v/a") == ["resume", "/v/a", "--epochs", "2"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Paceline Digits!", "paceline-digits-"),
        ("7", "job-7-"),
        ("é", "job-"),
        ("a" * 90, "a" * 23),
    ],
)
def test_names_are_dns_labels(name: str, expected: str) -> None:
    job = a_job(name=name)
    made = job.unique_name(30)
    assert made.startswith(expected)
    assert len(made) <= 30
    assert made != job.unique_name(30)


@pytest.mark.parametrize(
    ("patch", "expected"),
    [
        ({"a": {"x": 2}}, {"a": {"x": 2, "y": 1}}),
        ({"a": None}, {}),
        ({"a": {"y": None, "z": [1]}}, {"a": {"x": 1, "z": [1]}}),
        ({"a": "b"}, {"a": "b"}),
    ],
)
def test_mappings_are_merged(patch: Plain, expected: Plain) -> None:
    assert merged({"a": {"x": 1, "y": 1}}, patch) == expected


def test_lists_are_merged_by_name_or_appended_or_replaced() -> None:
    rendered: Plain = {"env": [{"name": "A", "value": "1"}], "command": ["a", "b"]}
    patch: Plain = {
        "env": [{"name": "B", "value": "2"}, {"name": "A", "value": "3"}, {"from": "c"}],
        "command": ["d"],
    }
    assert merged(rendered, patch) == {
        "env": [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}, {"from": "c"}],
        "command": ["d"],
    }


def test_times_of_a_patch_stay_text(tmp_path: Path) -> None:
    path = tmp_path / "patch.yaml"
    path.write_text("time: 12:00:00\nnodes: 4\n")
    assert read_patch(str(path)) == {"time": "12:00:00", "nodes": 4}


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", "1: 2\n", ""])
def test_a_patch_that_is_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "patch.yaml"
    path.write_text(text)
    with pytest.raises(UsageError, match="--job-patch"):
        read_patch(str(path))
    with pytest.raises(UsageError, match="can't be read"):
        read_patch(str(tmp_path / "nowhere"))
