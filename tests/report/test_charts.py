"""Which curves are drawn, and where marks and times fall."""

import json
import math
import re
from collections.abc import Callable
from html import unescape

import pytest

from paceline.report.charts import MAX_POINTS, choose_charts, find_marks, middles, thin
from paceline.report.curves import HEIGHT, WIDTH, choose_times, clock, draw_chart
from paceline.report.load_run import read_run
from paceline.report.page import render_page
from paceline.report.sections import epochs_table
from paceline.results.run_directory import RunDirectory

MakeRun = Callable[..., RunDirectory]


def test_top5_has_a_chart_only_where_there_are_numbers(make_run: MakeRun) -> None:
    slugs = [chart.slug for chart in choose_charts(read_run(make_run(top5=False)))]
    assert slugs == ["loss", "accuracy", "speed", "batch-time", "rate"]


def test_gpus_have_charts_and_columns_where_there_are_some(make_run: MakeRun) -> None:
    run = make_run()
    lines = run.metrics_csv.read_text().splitlines()
    rows = [
        f"{lines[0]},gpu_memory_bytes,gpu_utilization",
        *(f"{s},61.5e9,0.87" for s in lines[1:]),
    ]
    run.metrics_csv.write_text("\n".join([*rows, ""]))
    report = read_run(run)
    used, memory = choose_charts(report)[-2:]
    assert [(chart.slug, chart.series[0].last) for chart in (used, memory)] == [
        ("gpu", "87.00 %"),
        ("gpu-memory", "62 GB"),
    ]
    assert memory.series[0].values[0] == pytest.approx(61.5)
    table = epochs_table(report)
    assert {"GPU utilization", "GPU memory"} <= set(table.header)


def test_what_a_script_logs_has_charts_and_columns(make_run: MakeRun) -> None:
    run = make_run()
    lines = run.metrics_csv.read_text().splitlines()
    rows = [
        f"{lines[0]},val_f1,{{x}}<b>",
        *(f"{line},0.25,{n}" for n, line in enumerate(lines[1:])),
    ]
    run.metrics_csv.write_text("\n".join([*rows, ""]))
    report = read_run(run)
    f1, other = choose_charts(report)[-2:]
    assert (f1.title, f1.series[0].last) == ("val_f1", "0.25")
    assert other.series[0].values[:3] == (0, 1, 2)
    assert epochs_table(report).header[-2:] == ("val_f1", "{x}<b>")
    assert "{x}&lt;b&gt;" in render_page(report)


def test_marks_fall_between_the_ends_of_epochs(make_run: MakeRun) -> None:
    run = make_run()  # 23 steps an epoch
    description = json.loads(run.run_json.read_text())
    description["history"] += [
        {"reason": "restart", "from_step": 23},
        {"reason": "resume", "from_step": 57},
        {"reason": "resume", "from_step": 99999},
    ]
    run.run_json.write_text(json.dumps(description))
    marks = find_marks(read_run(run))
    assert [mark.epoch for mark in marks] == pytest.approx([1, 2 + 11 / 23, 12])
    assert marks[1].label == "resumed at step 57"


@pytest.mark.parametrize("length", [0, 1, 2, 999, 1000, 1001, 5000])
def test_thinning_keeps_the_ends_and_the_best(length: int) -> None:
    keep = [length // 3] if length else []
    chosen = thin(length, MAX_POINTS, keep)
    assert len(chosen) == min(length, MAX_POINTS) or length > MAX_POINTS
    assert len(chosen) <= MAX_POINTS
    assert chosen == sorted(set(chosen))
    assert {0, length - 1, *keep} <= set(chosen) or not length


def test_the_best_epoch_is_the_summarys(make_run: MakeRun) -> None:
    run = make_run(because="epochs")
    summary = json.loads(run.summary_json.read_text())
    run.summary_json.write_text(json.dumps({**summary, "best_epoch": 4}))
    loss, accuracy, *others = choose_charts(read_run(run))
    assert loss.highlight is not None
    assert accuracy.highlight is not None
    assert loss.highlight[0] == accuracy.highlight[0] == 4
    assert all(chart.highlight is None for chart in others)


def test_a_picture_is_deterministic_and_takes_the_pages_style(make_run: MakeRun) -> None:
    charts = choose_charts(read_run(make_run()))
    first = [draw_chart(chart) for chart in charts]
    assert first == [draw_chart(chart) for chart in charts]
    for picture in first:
        assert "var(--accent)" in picture
        assert "font" not in picture
        assert "<style" not in picture
        assert "<metadata" not in picture
        assert "#0" not in picture  # No stand-in colour is left.
        assert "xmlns" not in picture


def test_lone_points_and_gaps_are_drawn(make_run: MakeRun) -> None:
    run = make_run(done=1)
    for chart in choose_charts(read_run(run)):
        assert "<use" in draw_chart(chart)  # A line needs two points; one is a dot.


def test_losses_over_decades_get_a_logarithmic_axis(make_run: MakeRun) -> None:
    run = make_run()
    lines = ["epoch,train_loss"] + [f"{n},{10.0**-n}" for n in range(1, 6)]
    run.metrics_csv.write_text("\n".join([*lines, ""]))
    (chart,) = choose_charts(read_run(run))
    assert chart.logarithmic
    assert "<text" in draw_chart(chart)


@pytest.mark.parametrize(
    ("total_s", "times"),
    [
        (0.4, []),
        (4.9, [1, 2, 3, 4]),
        (62, [20, 40, 60]),
        (7300, [1800, 3600, 5400, 7200]),
        (86400 * 9, [86400 * n for n in (2, 4, 6, 8)]),
    ],
)
def test_times_are_round(total_s: float, times: list[int]) -> None:
    assert choose_times(total_s) == times


def test_clock() -> None:
    assert [clock(s) for s in (30, 90, 300, 5400, 7200, 172800)] == [
        "30 s",
        "90 s",
        "5 min",
        "90 min",
        "2 h",
        "2 d",
    ]


def test_times_that_are_close_to_each_other_are_left_out(make_run: MakeRun) -> None:
    run = make_run()
    times = [600 * epoch for epoch in range(1, 4)] + [1800 + epoch for epoch in range(4, 200)]
    rows = "".join(f"{epoch},{time_s},0.1\n" for epoch, time_s in enumerate(times, 1))
    run.metrics_csv.write_text(f"epoch,time_s,lr\n{rows}")
    (chart,) = choose_charts(read_run(run))
    shown = re.findall(r">(\d+ min)<", draw_chart(chart))
    assert len(shown) <= 1  # 10, 20 and 30 min fall into the first three of 199 epochs


def test_times_that_run_backwards_are_left_out(make_run: MakeRun) -> None:
    run = make_run()
    run.metrics_csv.write_text("epoch,time_s,lr\n1,50,0.1\n2,20,0.1\n3,,0.1\n")
    (chart,) = choose_charts(read_run(run))
    assert " s<" not in draw_chart(chart)
    assert math.isnan(chart.times_s[2])


def test_a_picture_carries_its_values_for_the_script(make_run: MakeRun) -> None:
    run = make_run(done=3)
    _, accuracy, *_ = choose_charts(read_run(run))
    (found,) = re.findall(r'data-chart="(.*?)"', draw_chart(accuracy))
    content = json.loads(unescape(found))
    left, top, width, height = content["box"]
    assert 0 < left < WIDTH - width
    assert 0 < top < HEIGHT - height
    assert content["x"]["name"] == "epoch"
    assert content["x"]["low"] < 1 < 3 < content["x"]["high"]
    assert content["y"]["percent"] is True
    training, validation = content["lines"]
    assert (training["label"], training["x"]) == ("training", [1, 2, 3])
    assert validation["y"] == pytest.approx(accuracy.series[1].values, rel=1e-4)
    assert validation["colour"] == "var(--accent)"
    assert ">accuracy</text>" in draw_chart(accuracy)


def write_steps(run: RunDirectory, steps: range) -> None:
    lines = ["epoch,step,time_s,samples,train_loss,train_accuracy,lr"]
    lines += [f"1,{n},{0.1 * n},{64 * n},{2.5 - 0.01 * n},{0.001 * n},0.1" for n in steps]
    run.steps_csv.write_text("\n".join([*lines, ""]))


def test_losses_are_drawn_over_steps_and_epochs_are_points_among_them(make_run: MakeRun) -> None:
    run = make_run(done=3)
    write_steps(run, range(1, 70))
    loss, accuracy, *others = choose_charts(read_run(run))
    trained, judged = loss.series
    assert [loss.axis, accuracy.axis] == ["step", "step"]
    assert trained.places == tuple(map(float, range(1, 70)))
    assert trained.values[22] == pytest.approx(2.27)
    assert judged.places == (23.0, 46.0, 69.0)
    assert loss.highlight is not None
    assert loss.highlight[0] in (23, 46, 69)
    assert "Loss by step" in loss.description
    assert draw_chart(loss).count("<use") > 3  # a marker for each epoch, and the ring
    assert all(chart.axis == "epoch" for chart in others)


def test_means_over_several_steps_stand_in_their_middle(make_run: MakeRun) -> None:
    run = make_run(done=1)
    lines = ["epoch,step,time_s,samples,train_loss,train_accuracy,lr"]
    lines += [f"1,{step},{step}.0,{step},{loss},0.5,0.1" for step, loss in ((1, 2.5), (23, 2.0))]
    run.steps_csv.write_text("\n".join([*lines, ""]))
    loss, *_ = choose_charts(read_run(run))
    assert loss.series[0].places == (1.0, 12.0)
    assert loss.places == (1.0, 23.0)  # where the training time is that of the row
    assert middles((1.0, 23.0), (23.0,)) == (1.0, 12.0)
    # Rows that were asked for on resuming alone.
    assert middles((50.0, 60.0), (20.0, 40.0, 60.0)) == (45.0, 55.0)


def test_a_training_of_23_steps_has_a_curve(make_run: MakeRun) -> None:
    run = make_run(because=None)
    run.metrics_csv.write_text("epoch,step,time_s\n")
    write_steps(run, range(1, 24))
    description = json.loads(run.run_json.read_text())
    description["history"].append({"reason": "resume", "from_step": 12})
    run.run_json.write_text(json.dumps(description))
    report = read_run(run)
    loss, accuracy = choose_charts(report)
    assert [len(chart.series) for chart in (loss, accuracy)] == [1, 1]
    assert " s<" in draw_chart(loss)  # times along the top
    assert [mark.step for mark in loss.marks] == [12]
    page = render_page(report)
    assert page.count(">step</text>") == 2


def test_more_steps_than_a_screen_shows_are_thinned(make_run: MakeRun) -> None:
    run = make_run()
    write_steps(run, range(1, 5000))
    loss = choose_charts(read_run(run))[0]
    assert len(loss.places) <= MAX_POINTS
    assert (loss.places[0], loss.places[-1]) == (1, 4999)
