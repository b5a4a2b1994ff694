"""Which lines and bars the pictures have, and how they are drawn."""

import re
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

from paceline.report.scaling.bars import draw_bars, step_picture
from paceline.report.scaling.charts import (
    Across,
    Line,
    Picture,
    efficiency_picture,
    learning_pictures,
    throughput_picture,
)
from paceline.report.scaling.lines import choose_labels, draw_lines, short
from paceline.report.scaling.series import find_methods
from paceline.results.study import Study, read_study
from tests.report.scaling.studies import BASELINE, Record, study_record, write_study

THREE = ("allreduce", "bf16", "powersgd")


def read(tmp_path: Path, record: Record) -> Study:
    return read_study(write_study(tmp_path, record))[0]


def test_the_ideal_line_goes_on_from_one_worker(tmp_path: Path) -> None:
    picture = throughput_picture(read(tmp_path, study_record()))
    ideal = next(line for line in picture.lines if line.style == "ideal")
    assert ideal.points == ((1.0, BASELINE), (8.0, 8 * BASELINE))
    assert [line.label for line in picture.legend] == ["measured", "ideal"]


def test_without_one_worker_there_is_no_ideal_line(tmp_path: Path) -> None:
    record = study_record((2, 4)) | {"baseline_images_per_s": None}
    picture = throughput_picture(read(tmp_path, record))
    assert [line.style for line in picture.lines] == ["measured"]


def test_all_methods_begin_at_the_one_worker_that_they_share(tmp_path: Path) -> None:
    methods = find_methods(read(tmp_path, study_record(methods=THREE)))
    assert [method.label for method in methods] == list(THREE)
    assert [[size.workers for size in method.sizes] for method in methods] == [[1, 2, 4, 8]] * 3
    assert {method.sizes[0].method for method in methods} == {"allreduce"}


def test_a_method_of_one_worker_alone_is_none(tmp_path: Path) -> None:
    record = study_record((1, 2), ("allreduce", "powersgd"))
    sizes = cast("list[Record]", record["sizes"])
    record["sizes"] = [
        size for size in sizes if size["workers"] == 1 or size["method"] == "powersgd"
    ]
    methods = find_methods(read(tmp_path, record))
    assert [method.label for method in methods] == ["powersgd"]
    assert len(methods[0].sizes) == 2


def test_one_method_with_several_options_is_several_series(tmp_path: Path) -> None:
    record = study_record((1, 2, 4), ("powersgd",))
    sizes = cast("list[Record]", record["sizes"])
    record["sizes"] = sizes + [
        {**size, "method_options": {"powersgd_rank": 2}} for size in sizes if size["workers"] != 1
    ]
    labels = [method.label for method in find_methods(read(tmp_path, record))]
    assert labels == ["powersgd (powersgd-rank 4)", "powersgd (powersgd-rank 2)"]


def test_a_prediction_has_a_band_and_reaches_further(tmp_path: Path) -> None:
    picture = efficiency_picture(read(tmp_path, study_record(predict=True)))
    predicted = next(line for line in picture.lines if line.style == "predicted")
    assert predicted.points[-1][0] == 64
    assert all(low < high for _, low, high in predicted.band)
    assert picture.wide
    assert "predicted: " in picture.description


def test_a_method_that_was_only_predicted_has_a_line_of_its_own(tmp_path: Path) -> None:
    record = study_record(predict=True)
    methods = cast("list[Record]", cast("Record", record["prediction"])["methods"])
    methods.append({**methods[0], "method": "powersgd"})
    picture = throughput_picture(read(tmp_path, record))
    assert [line.label for line in picture.legend] == ["measured", "powersgd", "ideal"]
    assert len({line.colour for line in picture.lines if line.style == "predicted"}) == 2


def test_trainings_share_a_picture_while_there_are_colours(tmp_path: Path) -> None:
    assert learning_pictures(read(tmp_path, study_record())) == ()
    time, samples = learning_pictures(read(tmp_path, study_record(train=True)))
    assert [line.label for line in time.lines] == [
        "1 worker",
        "2 workers",
        "4 workers",
        "8 workers",
    ]
    assert (time.title, samples.title) == (
        "Validation loss by training time",
        "Validation loss by samples seen",
    )
    many = learning_pictures(read(tmp_path, study_record(methods=THREE, train=True)))
    titles = [picture.title.rpartition(", ")[2] for picture in many[::2]]
    assert titles == ["8 workers", *THREE]
    assert [line.label for line in many[0].lines][1:] == [f"8 workers, {name}" for name in THREE]
    assert all(len(picture.lines) == 4 for picture in many)


def test_trainings_without_validation_show_the_training_loss(tmp_path: Path) -> None:
    record = study_record((1, 2), train=True)
    for size in cast("list[Record]", record["sizes"]):
        for point in cast("list[Record]", cast("Record", size["trained"])["curve"]):
            point["val_loss"] = None
    time, _ = learning_pictures(read(tmp_path, record))
    assert time.title == "Training loss by training time"


def test_bars_hold_all_parts_and_say_where_none_are_known(tmp_path: Path) -> None:
    record = study_record((1, 2))
    cast("list[Record]", record["sizes"])[1]["parts"] = None
    picture = step_picture(read(tmp_path, record))
    assert picture.bars[0].parts["backward"] == 0.525
    assert list(picture.bars[1].parts) == ["unknown"]
    assert ("unknown", "not told apart") in picture.legend
    assert "1 worker: 0.81 s (waiting for data 6 ms" in picture.description


def test_pictures_are_deterministic_and_take_the_pages_style(tmp_path: Path) -> None:
    study = read(tmp_path, study_record((1, 32), train=True, predict=True))
    pictures = [throughput_picture(study), efficiency_picture(study), *learning_pictures(study)]
    drawn = [draw_lines(picture) for picture in pictures] + [draw_bars(step_picture(study))]
    assert drawn[0] == draw_lines(pictures[0])
    for picture in drawn:
        assert "var(--" in picture
        assert "font" not in picture
        assert "#0" not in picture  # No stand-in colour is left.


@pytest.mark.parametrize("count", [1, 2, 8, 100])
def test_labels_along_an_axis_do_not_touch(count: int) -> None:
    places = [(350.0 * n / count, f"{10 * n:,}") for n in range(1, count + 1)]
    shown = choose_labels(places)
    assert count - 1 in shown
    for left, right in pairwise(shown):
        letters = (len(places[left][1]) + len(places[right][1])) / 2
        assert places[right][0] - places[left][0] > 7 * letters
    assert choose_labels([]) == []


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("across", ["time", "samples", "step"])
@pytest.mark.parametrize(
    ("first", "last"), [(0.1, 0.45), (0.6, 1.9), (12.0, 18.0), (1100.0, 1900.0), (4000.0, 7000.0)]
)
def test_an_axis_has_more_than_one_tick(
    wide: bool, across: Across, first: float, last: float
) -> None:
    line = Line(label="A", value="", colour=0, points=((first, 2.0), (last, 1.0)))
    picture = Picture(
        slug="loss", title="Loss", caption="", across=across, lines=(line,), wide=wide
    )
    labels = re.findall(r"text-anchor:middle[^>]*>([^<]+)</text>", draw_lines(picture))
    assert len(labels) == len(set(labels)) >= 2  # what goes up is written to the right


def test_ticks_are_short() -> None:
    assert [short(v) for v in (0.25, 950, 20000, 120000, 3.2e6)] == [
        "0.25",
        "950",
        "20,000",
        "120 k",
        "3.2 M",
    ]
