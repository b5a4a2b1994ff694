"""`study.json` is read whatever is in it."""

import json
from pathlib import Path
from typing import cast

import pytest

from paceline.results.study import read_study
from tests.report.scaling.studies import Record, study_record, write_study


def first_size(record: Record) -> Record:
    return cast("list[Record]", record["sizes"])[0]


def test_figures_are_read_as_they_stand(tmp_path: Path) -> None:
    study, problems = read_study(write_study(tmp_path, study_record(train=True, predict=True)))
    assert problems == ()
    assert [size.workers for size in study.sizes] == [1, 2, 4, 8]
    last = study.sizes[-1]
    assert last.images_per_s is not None
    assert last.parts is not None
    assert last.trained is not None
    assert last.images_per_s.low < last.images_per_s.median < last.images_per_s.high
    assert last.parts.backward == 0.525
    assert last.fixed.total_s == pytest.approx(9.4 / 8 + 0.8 + 1.7 + 0.9)
    assert last.fixed_share == pytest.approx(4.575 / 138.6, rel=0.01)
    assert len(last.trained.curve) == last.trained.epochs
    assert study.predicted is not None
    assert [p.workers for p in study.predicted.methods["allreduce"]] == [2, 4, 8, 16, 32, 64]


def test_sizes_are_put_in_order_methods_stay_in_theirs(tmp_path: Path) -> None:
    record = study_record((8, 1, 2), ("powersgd", "allreduce"))
    study, _ = read_study(write_study(tmp_path, record))
    found = [(size.workers, size.method) for size in study.sizes]
    both = [(n, name) for n in (2, 8) for name in ("powersgd", "allreduce")]
    assert found == [(1, "powersgd"), *both]


def test_a_missing_and_a_foreign_file_are_told(tmp_path: Path) -> None:
    assert read_study(tmp_path)[1] == ("study.json is missing or empty",)
    _, problems = read_study(write_study(tmp_path, {"format": 7}))
    assert problems == ("study.json has format 7; this Paceline reads 1",)
    (tmp_path / "study.json").write_text("[1]")
    assert read_study(tmp_path)[1] == ("study.json should hold a JSON object",)


def test_what_was_not_measured_is_none(tmp_path: Path) -> None:
    record = study_record((1,))
    first_size(record).update(
        images_per_s=None, step_s={"median": None}, efficiency=0, parts={}, fixed=None, lr=None
    )
    size = read_study(write_study(tmp_path, record))[0].sizes[0]
    assert (size.images_per_s, size.step_s, size.efficiency, size.parts) == (None,) * 4
    assert (size.fixed.total_s, size.fixed_share, size.lr) == (None,) * 3


def test_a_spread_without_ends_is_its_median(tmp_path: Path) -> None:
    record = study_record((1,))
    first_size(record).update(images_per_s={"median": 5.0, "high": 4.0}, step_s=0.25)
    size = read_study(write_study(tmp_path, record))[0].sizes[0]
    assert size.images_per_s is not None
    assert (size.images_per_s.low, size.images_per_s.high) == (5.0, 5.0)
    assert size.step_s is not None
    assert size.step_s.median == 0.25


def test_a_method_predicted_with_several_options_keeps_them_apart(tmp_path: Path) -> None:
    record = study_record(predict=True)
    prediction = cast("Record", record["prediction"])
    (method,) = cast("list[Record]", prediction["methods"])
    prediction["methods"] = [method, {**method, "label": "allreduce, other"}]
    study, _ = read_study(write_study(tmp_path, json.loads(json.dumps(record))))
    assert study.predicted is not None
    assert list(study.predicted.methods) == ["allreduce", "allreduce, other"]
