"""How a run stands, from its files alone."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.report import live
from paceline.report.charts import spans_decades
from paceline.report.live import RunFollower, sparkline
from paceline.report.load_run import read_run
from paceline.results.metrics_table import STEPS, StepRow, append_rows, cells_of, start_table
from paceline.results.run_directory import RunDirectory

MakeRun = Callable[..., RunDirectory]


def log_step(run: RunDirectory, step: int, loss: float) -> None:
    row = StepRow(
        epoch=(step - 1) // 23 + 1,
        step=step,
        time_s=0.5 * step,
        samples=64 * step,
        train_loss=loss,
        lr=0.05,
        images_per_s=1000.0,
    )
    append_rows(run.steps_csv, [cells_of(row)], table=STEPS)


@pytest.fixture
def running(make_run: MakeRun) -> RunDirectory:
    """A training of 20 epochs of 23 steps in its third, without an owner yet."""
    run = make_run(done=2, because=None)
    start_table(run.steps_csv, 0, table=STEPS)
    for step in range(10, 60, 10):
        log_step(run, step, 2.0 - 0.01 * step)
    return run


def test_a_running_training_is_followed_row_by_row(running: RunDirectory) -> None:
    with running.lock():
        follower = RunFollower(running)
        status = follower.read()
        assert (status.state, status.sentence, status.resume) == ("running", "", "")
        assert (status.epoch, status.epochs, status.step, status.steps) == (3, 20, 50, 460)
        assert status.eta_s == pytest.approx(0.5 * 410)
        assert (status.train_loss, status.images_per_s, status.lr) == (1.5, 1000.0, 0.05)
        assert (status.val_epoch, status.workers) == (2, 2)
        # What is torn stays for the next time.
        with running.steps_csv.open("a") as file:
            file.write("3,60,30.0,3840,1.")
        assert follower.read().step == 50
        with running.steps_csv.open("a") as file:
            file.write("25,,0.05,1000,,\n")
        assert follower.read().step == 60
        assert follower.losses == pytest.approx([1.9, 1.8, 1.7, 1.6, 1.5, 1.25])


def test_the_speed_is_that_of_the_last_seconds(running: RunDirectory) -> None:
    """A row of a short epoch is a single step, the first of which has everything to warm up."""
    follower = RunFollower(running)
    follower.read()
    for step, speed in ((52, 1000.0), (53, 250.0), (54, 1000.0), (57, 0.0), (58, 1000.0)):
        row = StepRow(epoch=3, step=step, time_s=20 + step / 10, samples=0, images_per_s=speed)
        append_rows(running.steps_csv, [cells_of(row)], table=STEPS)
    # Since step 50, five seconds ago: seven steps at 1000 and one at 250.
    assert follower.read().images_per_s == pytest.approx(8 / (7 / 1000 + 1 / 250))


def test_after_a_resume_the_rows_that_are_gone_are_forgotten(running: RunDirectory) -> None:
    follower = RunFollower(running)
    follower.read()
    start_table(running.steps_csv, 30, table=STEPS)
    for step in range(31, 36):  # more than there was before
        log_step(running, step, 0.5)
    assert follower.read().step == 35
    assert follower.losses == pytest.approx([1.9, 1.8, 1.7] + [0.5] * 5)


def test_without_rows_within_the_epochs_those_of_epochs_have_to_do(make_run: MakeRun) -> None:
    run = make_run(done=3, because=None)
    with run.lock():
        follower = RunFollower(run)
        status = follower.read()
    assert (status.step, status.epoch) == (3 * 23, 3)
    assert len(follower.losses) == 3


def test_how_a_training_has_ended(make_run: MakeRun) -> None:
    run = make_run(because=None)
    died = RunFollower(run).read()
    assert died.state == "died"
    assert "its launcher was killed" in died.sentence
    assert "resume" in died.resume
    failure = {"rank": 1, "error_type": "ValueError", "message": "no"}
    (run.logs / "failure-rank-1.json").write_text(json.dumps(failure))
    failed = RunFollower(run).read()
    assert (failed.state, "ValueError: no" in failed.sentence) == ("failed", True)
    with run.lock():  # its workers are being started again
        assert RunFollower(run).read().state == "running"


@pytest.mark.parametrize(
    ("because", "state"), [("epochs", "finished"), ("signal", "stopped"), ("target", "finished")]
)
def test_the_summary_says_how(make_run: MakeRun, because: str, state: str) -> None:
    status = RunFollower(make_run(because=because)).read()
    assert status.state == state
    assert status.images_per_s == 10950.0
    assert status.eta_s is None


def test_a_training_that_ends_while_it_is_read_has_not_died(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(because="epochs")
    ended = read_run(run, with_steps=False)
    reports = [replace(ended, summary={}), ended]
    monkeypatch.setattr(live, "read_run", lambda run, with_steps: reports.pop(0))
    assert RunFollower(run).read().state == "finished"


def test_nothing_is_written(running: RunDirectory) -> None:
    def state(path: Path) -> dict[str, tuple[int, int]]:
        found = {str(p): p.stat() for p in path.rglob("*")}
        return {name: (each.st_mtime_ns, each.st_size) for name, each in found.items()}

    before = state(running.path)
    RunFollower(running).read()
    assert state(running.path) == before


def test_a_curve_that_falls_over_decades_is_drawn_on_a_logarithmic_scale() -> None:
    falling = [10.0 ** -(i / 2) for i in range(8)]
    assert spans_decades(falling)
    assert sparkline(falling, 8) == "█▇▆▅▄▃▂▁"  # linear, all but the first three were the same
    assert not spans_decades([1.0, 0.5, 0.1])
    assert not spans_decades([1.0, 0.0])
    assert not spans_decades([])
    assert sparkline([4.0, 3.0, 2.0, 1.0, 0.5], 5) == "█▆▄▂▁"


def test_files_that_are_none_of_ours_are_said_to_be(running: RunDirectory) -> None:
    running.steps_csv.unlink()
    running.steps_csv.mkdir()
    running.run_json.write_text("{")
    status = RunFollower(running).read()
    assert (status.step, status.epochs) == (46, None)
    assert any("run.json isn't valid JSON" in problem for problem in status.problems)


@pytest.mark.parametrize(
    ("values", "width", "drawn"),
    [
        ([], 10, ""),
        ([1.0], 10, "▁"),
        ([2.0, 2.0], 10, "▁▁"),
        ([0.0, 7.0], 10, "▁█"),
        ([float(n) for n in range(16)], 8, "▁▂▃▄▅▆▇█"),
    ],
)
def test_losses_as_one_line(values: list[float], width: int, drawn: str) -> None:
    assert sparkline(values, width) == drawn


def test_losses_as_one_line_of_ascii() -> None:
    assert sparkline([float(n) for n in range(700)], 7, plain=True) == "_.-=+*#"
