"""A study in words."""

import csv
import io
from dataclasses import replace

import pytest

from paceline.results.profile import StepParts
from paceline.results.study import Study
from paceline.scaling.result import summarise
from paceline.scaling.table import WIDTH, as_csv, as_text
from tests.scaling.studies import ASKED, TRAINED, ec2_like, failed, measured, size


def test_the_table_of_the_study_on_ec2() -> None:
    lines = [line.split() for line in as_text(ec2_like()).splitlines()]
    head = "workers nodes batch lr steps images/s efficiency spread n epoch".split()
    place = lines.index(head)
    assert lines[place + 4] == "8 8 256 2.83e-4 82 146 0.46 0.45-0.46 3 2:29".split()


def test_where_the_time_goes() -> None:
    text = as_text(ec2_like())
    lines = [line.split() for line in text.splitlines()]
    place = lines.index(
        "workers step data forward backward exposed waiting optimizer other".split()
    )
    assert lines[place + 4] == "8 1,756 10.0 250 500 956 0.00 30.0 10.0".split()
    assert "8 workers with allreduce: 3.6 times the best images/s of one; of a step 54 %" in text
    place = lines.index("workers evaluation snapshot loader start of the epoch sent".split())
    assert lines[place + 4] == "8 4.0 s 500 ms - 3.0 % 7.0 kB".split()


def test_no_conclusion_is_drawn_of_what_is_not_reliable() -> None:
    found = {size(1): [measured(1, 0.8)], size(2): [measured(2, 0.8 / 17.23)]}
    paragraphs = as_text(summarise(ASKED, list(found), found, {}, {})).split("\n\n")
    assert paragraphs[1].startswith("Not reliable: each of 2 workers with allreduce seems to do")
    assert not any("times the best images/s" in paragraph for paragraph in paragraphs)


def test_what_was_trained() -> None:
    lines = [line.split() for line in as_text(ec2_like()).splitlines()]
    assert "1 14 2:00:00 time budget 0.3795 88.00 % 0.4485 86.90 %".split() in lines


def test_large_figures_with_methods_fit_a_terminal() -> None:
    big = replace(measured(512, 1.0), images_per_s=12_345_678.0, lr=1.23456e-05)
    wide = [replace(big, run_dir="runs/x"), replace(big, images_per_s=10_000_000.0)]
    found = {size(1): [measured(1, 0.8)], size(512, "allreduce"): wide, size(512, "powersgd"): wide}
    told = replace(TRAINED, epochs=10000, train_time_s=86400.0, test_loss=1.2e-5)
    every = dict.fromkeys(found, told)
    text = as_text(summarise(ASKED, list(found), found, {}, every))
    assert max(map(len, text.splitlines())) <= WIDTH, text
    assert "powersgd" in text


def test_a_prediction_is_told_with_its_network() -> None:
    told = {"text": ["2 nodes pay, 8 don't."], "link": {"source": "437 Mbit/s, fitted"}}
    text = as_text(replace(ec2_like(), prediction=told))
    assert "Predicted for more hosts (network: 437 Mbit/s, fitted)\n2 nodes pay, 8 don't." in text


def test_what_failed_is_said_and_has_dashes() -> None:
    problem = "OutOfMemoryError: CUDA out of memory. " + 20 * "Tried to allocate 20 MiB. "
    found = {size(1): [measured(1, 0.8)], size(8): [failed(8, problem)]}
    text = as_text(summarise(ASKED, list(found), found, {}, {}))
    assert "8 workers with allreduce couldn't be measured: OutOfMemoryError" in text
    assert "8      8      -" in text
    assert max(map(len, text.splitlines())) <= WIDTH


def test_a_study_of_nothing() -> None:
    assert as_text(ASKED).startswith("Scaling of imagefolder-vgg19: weak")
    assert as_csv(ASKED) == ""
    assert "-" in as_text(_without_parts())


def test_a_single_measurement_has_no_spread_and_what_is_missing_is_said() -> None:
    found = {size(1): [measured(1, 0.8)], size(2): []}
    text = as_text(summarise(ASKED, list(found), found, {}, {}))
    assert "1 1 32 0.0001 650 40 1.00 - 1 8:44".split() in [x.split() for x in text.splitlines()]
    assert "- Not measured yet: 2 workers with allreduce" in text


def test_rows_for_a_spreadsheet() -> None:
    rows = list(csv.DictReader(io.StringIO(as_csv(ec2_like()))))
    assert [row["workers"] for row in rows] == ["1", "2", "4", "8"]
    assert float(rows[3]["efficiency"]) == pytest.approx(0.4554, abs=1e-3)
    assert float(rows[3]["exposed_s"]) == pytest.approx(0.956, abs=1e-3)
    assert rows[0]["test_accuracy"] == "0.869"
    assert rows[1]["test_accuracy"] == ""


def _without_parts() -> Study:
    study = ec2_like()
    nothing = StepParts(
        data=0.0, forward=0.0, backward=0.0, exposed=0.0, waiting=0.0, optimizer=0.0, other=0.0
    )
    sizes = [replace(each, parts=None, epoch_s=None, steps_per_epoch=0) for each in study.sizes]
    return replace(study, sizes=(*sizes[:3], replace(sizes[3], parts=nothing)))
