import re
from pathlib import Path

import pytest

from paceline.launch.cluster import ClusterJob
from paceline.launch.node_command import NodeRun, label, node_command, run_dir_on, train_command
from tests.launch.cluster_jobs import a_job

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


@pytest.mark.parametrize(
    "name", ["paceline-digits", "Über_Run 3", "---", "", "9lives", "a" * 90, "x.y/z", "a-" * 40]
)
def test_names_are_labels_of_dns(name: str) -> None:
    made = label(name, "3fa9c2", 46)
    assert DNS_LABEL.fullmatch(made)
    assert len(made) <= 46
    assert made.endswith("-3fa9c2")


@pytest.mark.parametrize(
    ("run_dir", "placed"),
    [
        ("runs/a", "/data/runs/a"),
        ("/data/a", "/data/a"),
        ("/elsewhere/a", "/data/a"),
        ("a", "/data/a"),
    ],
)
def test_the_run_directory_lies_on_the_volume(run_dir: str, placed: str) -> None:
    assert run_dir_on("/data", run_dir) == placed


def words_of(*command: str, workers: int | None = None) -> list[str]:
    return train_command(a_job(command=("paceline", *command), workers=workers), "/v/r")


def test_the_command_gets_the_nodes_run_directory() -> None:
    expected = ["train", "digits", "--lr", "1", "--run-dir", "/v/r"]
    assert words_of("train", "digits", "--run-dir", "x", "--lr", "1") == expected
    assert words_of("train", "digits", "--lr", "1", "--run-dir=x") == expected
    assert words_of("train", "digits", "--lr", "1") == expected


def test_workers_are_said_once() -> None:
    assert words_of("train", "digits", workers=2)[2:] == ["--workers", "2", "--run-dir", "/v/r"]
    assert words_of("train", "digits", "--workers", "2", workers=2).count("--workers") == 1
    assert "--workers" not in words_of("train", "digits")


def test_a_scripts_own_arguments_stay_its_own() -> None:
    words = words_of("run", "train.py", "--lr", "1", "--", "--run-dir", "theirs", workers=2)
    assert words == ("run train.py --lr 1 --workers 2 --run-dir /v/r -- --run-dir theirs".split())


def test_resuming_means_the_nodes_run_directory() -> None:
    words = words_of("resume", "/here/runs/a", "--epochs", "3", workers=2)
    assert words == ["resume", "/v/r", "--epochs", "3", "--workers", "2"]


def test_what_a_node_runs() -> None:
    job: ClusterJob = a_job(resume=True, directory=Path("/x"))
    run = NodeRun(submission="3fa9c2", run_dir="/v/r", host="h-0.h")
    assert node_command(job, run) == [
        *("python3", "-P", "-m", "paceline.launch.continuing", "--run-dir", "/v/r"),
        *("--submission", "3fa9c2", "--host", "h-0.h", "--resume", "--"),
        *("train", "digits", "--run-dir", "/v/r"),
    ]
    shared = node_command(a_job(shared=True), run)
    assert shared.index("--shared") < shared.index("--")
