"""`paceline watch`: how a training is followed from another shell."""

import json
import os
import shutil
import signal
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli.app import main as command
from paceline.cli.commands import watch
from paceline.cli.commands.watch import lines_of, main
from paceline.errors import ExitCode
from paceline.launch.watchdog.stragglers import live_path, write_live
from paceline.report.live import RunFollower, RunStatus
from paceline.results.metrics_table import (
    STEPS,
    StepRow,
    append_rows,
    cells_of,
    read_table,
    start_table,
)
from paceline.results.run_directory import RunDirectory
from tests.cli.conftest import Paceline, newest_step, wait_for_step
from tests.launch.watchdog import states

GOLDEN = Path(__file__).parents[1] / "results" / "golden" / "run"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A training of two epochs that has ended, and was never moved since."""
    shutil.copytree(GOLDEN, tmp_path / "run")
    run = RunDirectory(tmp_path / "run")
    run.logs.mkdir(exist_ok=True)
    return run


def test_one_object_for_other_programs(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(run.path), "--json"]) == ExitCode.DONE
    content = json.loads(capsys.readouterr().out)
    assert (content["state"], content["step"], content["workers"]) == ("finished", 46, 2)
    assert content["val_epoch"] == content["best_epoch"] == 2
    assert sum(content["parts"].values()) == pytest.approx(1)


def test_in_a_pipe_each_change_is_a_line_until_the_end(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = run.summary_json.read_text()
    run.summary_json.unlink()
    start_table(run.steps_csv, 0, table=STEPS)
    with ExitStack() as owner:
        owner.enter_context(run.lock())
        passed = iter(range(4))

        def go_on(seconds: float) -> None:
            """Stand for a second in which the training goes on, and in the end is over."""
            step = next(passed)
            if step == 3:
                run.summary_json.write_text(summary)
                owner.close()
            elif step:  # nothing happens in the first
                row = StepRow(epoch=step, step=23 * step, time_s=step, train_loss=1 / step)
                append_rows(run.steps_csv, [cells_of(row)], table=STEPS)

        monkeypatch.setattr(time, "sleep", go_on)
        assert main([str(run.path)]) == ExitCode.DONE
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4  # nothing is said twice
    assert "step 23 of 46" in lines[1]
    assert "loss 0.5000" in lines[2]
    assert lines[3].endswith("finished all 2 epochs")


def test_ctrl_c_ends_the_watching_alone(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    run.summary_json.unlink()
    monkeypatch.setattr(time, "sleep", interrupted)
    with run.lock():
        assert main([str(run.path)]) == ExitCode.DONE
    assert "epoch 2 of 2, step 46 of 46" in capsys.readouterr().out


def test_a_directory_without_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["watch", str(tmp_path)]) == ExitCode.USAGE
    assert "holds no training (no run.json)" in capsys.readouterr().err
    with RunDirectory(tmp_path).lock():  # it begins
        assert command(["watch", str(tmp_path), "--json"]) == ExitCode.DONE
    assert json.loads(capsys.readouterr().out)["state"] == "running"


def shown(run: RunDirectory, width: int, *, plain: bool = False, **changed: object) -> list[str]:
    follower = RunFollower(run)
    status: RunStatus = replace(follower.read(), **changed)  # type: ignore[arg-type]
    return lines_of(status, follower.losses, width, plain=plain)


@pytest.mark.parametrize("width", [60, *range(76, 82), 120])
def test_the_figures_fit_the_terminal(run: RunDirectory, width: int) -> None:
    lines = shown(run, width, state="running", eta_s=75.0, age_s=99.0, restarts=2)
    assert all(len(line) <= width for line in lines)
    # What is said of the end is parted from no figure.
    assert not any(line.endswith("ETA") for line in lines)
    text = " ".join(" ".join(lines).split())
    assert "running epoch 2 of 2, step 46 of 46" in text
    assert "ETA 1 min 15 s, newest figures 1 min 39 s old" in text
    assert "workers 2, 2 restarts" in text
    assert "▁" in text
    assert "backward" in text


FAST = replace(states.FAST, step=1400, doing="evaluate")
SLOW = replace(FAST, rank=3, host="node1", doing="step", compute_s=0.03, waiting_s=0, data_s=0.07)


def test_each_worker_has_a_line(run: RunDirectory) -> None:
    lines = shown(run, 80, state="running", speeds=(SLOW, FAST), workers=2)
    assert all(len(line) <= 80 for line in lines)
    place = next(i for i, line in enumerate(lines) if line.startswith("workers"))
    header, slow, fast = (line.split("  ") for line in lines[place + 1 : place + 4])
    assert [cell.strip() for cell in slow if cell] == [
        *("3", "node1", "1,400", "100", "30 %", "0 %", "70 %", "step, slow by data")
    ]
    assert [cell.strip() for cell in fast if cell] == [
        *("0", "node0", "1,400", "100", "40 %", "50 %", "10 %", "evaluate")
    ]
    assert "waiting" in "".join(header)


def test_of_many_workers_the_slowest_are_shown(run: RunDirectory) -> None:
    speeds = [replace(FAST, rank=rank, host="a-node-with-a-long-name" * 3) for rank in range(20)]
    lines = shown(run, 80, state="running", speeds=tuple(speeds), workers=20)
    assert all(len(line) <= 80 for line in lines)
    assert sum("a-node" in line for line in lines) == 8
    assert any(line.endswith("and 12 faster ones: paceline workers") for line in lines)


def test_speeds_are_read_while_a_training_runs(run: RunDirectory) -> None:
    write_live(live_path(run.logs), [SLOW, FAST])
    assert RunFollower(run).read().speeds == ()  # left by a launcher that was killed
    run.summary_json.unlink()
    with run.lock():
        status = RunFollower(run).read()
    assert status.speeds == (SLOW, FAST)
    assert json.loads(json.dumps(status.to_json()))["speeds"][0]["rank"] == 3


def test_a_loss_that_falls_over_decades_says_so(run: RunDirectory) -> None:
    status = replace(RunFollower(run).read(), state="running")
    text = "\n".join(lines_of(status, [10.0, 1.0, 0.1, 0.01], 80, plain=False))
    assert "█▆▃▁ (log scale)" in text
    assert "log scale" not in "\n".join(lines_of(status, [2.0, 1.0], 80, plain=False))


def test_a_terminal_without_utf_8_gets_ascii(run: RunDirectory) -> None:
    assert all(line.isascii() for line in shown(run, 80, plain=True))


def test_text_of_others_cant_drive_the_terminal(run: RunDirectory) -> None:
    lines = shown(run, 80, recipe="\x1b[31mred", problems=("run\x07.json",))
    assert all(line.isprintable() for line in lines)


def test_on_a_terminal_the_last_figures_stay(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    watch.follow_live(RunFollower(run))
    out = capsys.readouterr().out
    assert "finished      epoch 2 of 2, step 46 of 46" in out
    assert out.count("\n") >= 7


@pytest.mark.slow
def test_a_training_is_followed_to_its_stop_and_each_step_has_one_row(paceline: Paceline) -> None:
    run = paceline.directory / "run"
    training = paceline.start(
        *("train", "digits", "--workers", "2", "--epochs", "500", "--target-accuracy", "none"),
        *("--log-every", "5", "--run-dir", run),
    )
    wait_for_step(run, 23)
    watching = paceline.start("watch", run)
    assert watching.stdout is not None
    first = [watching.stdout.readline() for _ in range(2)]  # it looks once a second
    wait_for_step(run, newest_step(run) + 46)
    os.killpg(training.pid, signal.SIGINT)
    assert paceline.finish(training).code == ExitCode.RESUMABLE
    seen = paceline.finish(watching)
    assert seen.code == ExitCode.DONE, seen.err
    *lines, last = [*first, *seen.out.splitlines()]
    assert len(lines) > 1
    assert all("ETA" in line and "loss" in line for line in lines)
    stopped = newest_step(run)
    assert f"step {stopped:,} of 11,500" in last
    assert "interrupted by a signal" in last
    steps = [int(row["step"]) for row in read_table(run / "steps.csv", STEPS)]
    # Every fifth step, the ends of epochs, and the step of the stop.
    assert steps == [n for n in range(1, stopped + 1) if n % 5 == 0 or n % 23 == 0 or n == stopped]
