"""What a training of a study showed, read from its run directory."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.results.run_directory import RunDirectory
from paceline.results.study import Measured
from paceline.scaling.measurement import read_measured, read_whole
from tests.scaling.studies import failed, measured, profile

RUN: Mapping[str, object] = {
    "kind": "recipe",
    "given": ["global_batch"],
    "settings": {"global_batch": 64},
    "derived": {
        "lr": 0.05,
        "threads": 2,
        "global_batch": 64,
        "steps_per_epoch": 3,
        "train_samples": 150,
    },
    "hosts": [{"host": "a", "cores": 8}, {"host": "b", "cores": 4}],
    "versions": {"torch": "2.15.0"},
}
METRICS = """epoch,step,time_s,train_loss,val_loss,val_accuracy
1,3,1.5,2.0,1.0,0.5
2,6,3.0,1.0,,
3,7,3.5,0.5,0.4,0.9
"""


def run_directory(path: Path, run: Mapping[str, object] = RUN) -> RunDirectory:
    path.mkdir(parents=True, exist_ok=True)
    (path / "run.json").write_text(json.dumps(run))
    (path / "profile.json").write_text(profile(2, 1.0).to_json())
    (path / "metrics.csv").write_text(METRICS)
    return RunDirectory(path)


def test_a_measurement_is_read_and_kept(tmp_path: Path) -> None:
    record = read_measured(run_directory(tmp_path / "run"), "runs/2-allreduce-1", 31.5, "allreduce")
    assert record.profile == profile(2, 1.0)
    assert (record.images_per_s, record.step_s) == (64.0, 1.0)
    assert (record.lr, record.threads, record.cores) == (0.05, 2, 4)
    assert (record.problem, record.script_batch, record.exit_code) == (None, None, 0)
    record.write(tmp_path / "kept.json")
    assert Measured.read(tmp_path / "kept.json") == record


@pytest.mark.parametrize(
    ("given", "kind", "batch"),
    [([], "script", 64), (["global_batch"], "script", None), ([], "recipe", None)],
)
def test_a_batch_that_the_script_settles_is_noticed(
    given: list[str], kind: str, batch: int | None, tmp_path: Path
) -> None:
    run = run_directory(tmp_path, {**RUN, "given": given, "kind": kind})
    assert read_measured(run, "runs/1", 1.0, "allreduce").script_batch == batch


def test_a_methods_options_are_those_that_the_training_had(tmp_path: Path) -> None:
    own = {"powersgd_rank": 2, "sync_warmup_steps": 0}
    run = run_directory(tmp_path, {**RUN, "settings": {**own, "sync_precision": "fp32"}})
    (tmp_path / "profile.json").write_text(profile(2, 1.0, sync="powersgd").to_json())
    record = read_measured(run, "runs/1", 1.0, "powersgd")
    assert record.method_options == {"powersgd_rank": 2}


def test_another_method_than_was_asked_for_is_a_problem(tmp_path: Path) -> None:
    record = read_measured(run_directory(tmp_path), "runs/1", 1.0, "powersgd")
    assert (record.profile, record.exit_code) == (None, 2)
    assert "by allreduce, and powersgd was to be measured" in (record.problem or "")


def test_a_training_without_a_profile_is_a_problem(tmp_path: Path) -> None:
    run = run_directory(tmp_path)
    run.profile_json.unlink()
    record = read_measured(run, "runs/1", 1.0, "allreduce")
    assert record.profile is None
    assert "paceline.session()" in (record.problem or "")


@pytest.mark.parametrize("file", ["profile.json", "run.json"])
def test_a_damaged_file_is_a_problem_that_names_it(file: str, tmp_path: Path) -> None:
    run = run_directory(tmp_path)
    (tmp_path / file).write_text("{")
    assert file in (read_measured(run, "runs/1", 1.0, "allreduce").problem or "")


def test_a_failure_is_kept_too(tmp_path: Path) -> None:
    failed(4, "out of memory").write(tmp_path / "kept.json")
    assert Measured.read(tmp_path / "kept.json") == failed(4, "out of memory")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"profile": {"format": 1}}'])
def test_a_torn_record_counts_as_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text(text)
    assert Measured.read(tmp_path / "kept.json") is None
    assert Measured.read(tmp_path / "nowhere.json") is None
    measured(1, 0.8).write(tmp_path / "kept.json")
    assert Measured.read(tmp_path / "kept.json") == measured(1, 0.8)


def test_a_whole_training(tmp_path: Path) -> None:
    run = run_directory(tmp_path)
    summary = {"epochs": 2, "stopped_because": "time", "train_time_s": 3.5, "best_val_loss": 0.4}
    run.summary_json.write_text(json.dumps(summary))
    trained = read_whole(run, "trained/2-allreduce")
    assert trained is not None
    assert (trained.epochs, trained.stopped_because, trained.best_val_loss) == (2, "time", 0.4)
    assert trained.test_accuracy is None
    assert [point.samples for point in trained.curve] == [150, 300, 364]
    assert [point.val_loss for point in trained.curve] == [1.0, None, 0.4]


def test_samples_of_a_stream(tmp_path: Path) -> None:
    run = run_directory(tmp_path, {**RUN, "derived": {"global_batch": 10, "steps_per_epoch": 0}})
    run.summary_json.write_text("{}")
    trained = read_whole(run, "x")
    assert trained is not None
    assert [point.samples for point in trained.curve] == [30, 60, 70]


def test_a_training_that_has_not_ended(tmp_path: Path) -> None:
    assert read_whole(run_directory(tmp_path), "x") is None
    record = replace(measured(1, 1.0), lr=None)
    assert record.lr is None
