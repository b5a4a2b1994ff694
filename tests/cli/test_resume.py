"""Stopping and going on: the same bits as a training that was never stopped."""

import json
import os
import random
import re
import shutil
import signal
import tempfile
from pathlib import Path

import psutil
import pytest

from paceline.errors import ExitCode
from tests.cli.conftest import (
    Paceline,
    metrics_without_times,
    newest_step,
    summary,
    wait_for_step,
    wait_until,
    workers_of,
)
from tests.launch.waiting import patient
from tests.script.scripts import at_step, write_script

pytestmark = pytest.mark.ranks

_LONG = (
    "train digits --workers 2 --epochs 24 --target-accuracy none --snapshot-every-steps 9"
).split()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("undisturbed")
    done = Paceline(directory).run(*_LONG, "--run-dir", directory / "run")
    assert done.code == 0, done.err
    return directory / "run"


def assert_same(run: Path, undisturbed: Path) -> None:
    assert summary(run)["weights_sha256"] == summary(undisturbed)["weights_sha256"]
    assert metrics_without_times(run) == metrics_without_times(undisturbed)


@pytest.mark.xdist_group("undisturbed")
@pytest.mark.slow
def test_signals_stop_at_once_and_resume_exactly(
    paceline: Paceline, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    process = paceline.start(*_LONG, "--run-dir", run)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        wait_for_step(run, newest_step(run) + 30)
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)
        stopped = paceline.finish(process)
        assert stopped.code == ExitCode.RESUMABLE, stopped.err
        step = newest_step(run)
        assert f"Resume from step {step}: paceline resume {run}" in stopped.out
        assert summary(run)["stopped_because"] == "signal"
        _, alive = psutil.wait_procs(family, timeout=patient(30))
        assert not alive
        process = paceline.start("resume", run)
    done = paceline.finish(process)
    assert done.code == 0, done.err
    assert_same(run, undisturbed)
    reasons = [start["reason"] for start in json.loads((run / "run.json").read_text())["history"]]
    assert reasons == ["start", "resume", "resume", "resume"]


@pytest.mark.xdist_group("undisturbed")
@pytest.mark.slow
def test_killed_workers_are_restarted_exactly(
    paceline: Paceline, tmp_path: Path, undisturbed: Path
) -> None:
    run, kills = tmp_path / "run", 3
    chance = random.Random(7)
    process = paceline.start(*_LONG, "--run-dir", run)
    for _ in range(kills):
        wait_for_step(run, newest_step(run) + chance.randint(15, 80))
        wait_until(lambda: len(workers_of(process)) == 2, "both workers run")
        chance.choice(list(workers_of(process))).kill()
    done = paceline.finish(process)
    assert done.code == 0, done.err
    assert summary(run)["restarts"] == kills
    assert len(re.findall("killed by SIGKILL", done.err)) == kills
    assert_same(run, undisturbed)


@pytest.mark.xdist_group("undisturbed")
@pytest.mark.slow
def test_a_killed_launcher_leaves_no_worker_and_can_be_resumed(
    paceline: Paceline, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    with tempfile.TemporaryDirectory() as name:
        temporary = {"TMPDIR": name}
        process = paceline.start(*_LONG, "--run-dir", run, env=temporary)
        wait_for_step(run, 40)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        paceline.finish(process)
        (base,) = Path(name).iterdir()
        assert len([path for path in base.iterdir() if path.is_dir()]) == 1
        done = paceline.run("train", "digits", "--epochs", "1", "--run-dir", "next", env=temporary)
        assert done.code == 0, done.err
        assert list(base.iterdir()) == []
        assert list(Path(name).iterdir()) == [base]
    _, alive = psutil.wait_procs(family, timeout=patient(30))
    assert not alive
    assert paceline.run("report", run).code == 0
    assert "Interrupted without a word" in (run / "report.html").read_text()
    done = paceline.run("resume", run)
    assert done.code == 0, done.err
    assert_same(run, undisturbed)


@pytest.mark.slow
@pytest.mark.xdist_group("undisturbed")
def test_a_damaged_snapshot_is_set_aside_and_the_one_before_used(
    paceline: Paceline, tmp_path: Path, undisturbed: Path
) -> None:
    run = tmp_path / "run"
    process = paceline.start(*_LONG, "--run-dir", run)
    wait_for_step(run, 60)
    process.send_signal(signal.SIGTERM)
    assert paceline.finish(process).code == ExitCode.RESUMABLE
    newest = newest_step(run)
    file = run / "snapshots" / f"step-{newest:012d}" / "tensors.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    done = paceline.run("resume", run)
    assert done.code == 0, done.err
    assert "damaged: its SHA-256" in done.out
    assert (run / "snapshots" / f"step-{newest:012d}.damaged").is_dir()
    assert_same(run, undisturbed)


@pytest.mark.slow
def test_other_settings_need_a_word(paceline: Paceline, tmp_path: Path) -> None:
    run = tmp_path / "run"
    short = [
        "train",
        "digits",
        "--on",
        "here",
        "--epochs",
        "1",
        "--target-accuracy",
        "none",
        "--run-dir",
    ]
    assert paceline.run(*short, run).code == 0
    refused = paceline.run("resume", run, "--lr", "0.5", "--seed", "3")
    assert refused.code == ExitCode.USAGE
    assert "lr: the run has 0.05, you give 0.5" in refused.err
    assert "seed can't change within a training" in refused.err
    more = ["--epochs", "2", "--allow-change", "epochs", "--on", "here"]
    done = paceline.run("resume", run, *more)
    assert done.code == 0, done.err
    assert summary(run)["epochs"] == 2
    assert len(metrics_without_times(run)) == 3


@pytest.mark.slow
def test_another_number_of_workers_keeps_the_global_batch(
    paceline: Paceline, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    start = "train digits --batch-per-worker 16 --workers 2 --epochs 1 --target-accuracy none"
    assert paceline.run(*start.split(), "--run-dir", run).code == 0
    done = paceline.run(
        "resume",
        run,
        *["--workers", "1", "--epochs", "2", "--allow-change", "epochs", "--on", "here"],
    )
    assert done.code == 0, done.err
    found = summary(run)
    assert (found["world_size"], found["global_batch"]) == (1, 32)
    assert found["samples_seen"] == 2 * 1442


@pytest.mark.slow
def test_two_trainings_in_one_directory(paceline: Paceline, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = paceline.start(*_LONG, "--run-dir", run)
    wait_for_step(run, 1)
    refused = paceline.run("resume", run)
    assert refused.code == ExitCode.USAGE
    assert f"another training is running in {run} (process {process.pid} on" in refused.err
    process.send_signal(signal.SIGTERM)
    assert paceline.finish(process).code == ExitCode.RESUMABLE


@pytest.mark.slow
def test_what_is_gone_is_told(paceline: Paceline, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert paceline.run(*"train digits --on here --epochs 2 --run-dir".split(), run).code == 0
    for command, what in (
        (["--epochs", "1", "--allow-change", "epochs"], "that can't be undone. Give at least 2"),
        (["--optimizer", "adam", "--allow-change", "optimizer"], "optimizer can't change within"),
    ):
        refused = paceline.run("resume", run, *command)
        assert refused.code == ExitCode.USAGE
        assert what in refused.err
    rows = (run / "metrics.csv").read_text().splitlines()
    (run / "metrics.csv").write_bytes(bytes(100))
    done = paceline.run("resume", run, *"--on here --epochs 3".split())
    assert done.code == 0, done.err
    assert f"2 rows of {run}/metrics.csv had been lost or damaged: back from the sn" in done.out
    assert (run / "metrics.csv").read_text().splitlines()[:3] == rows
    for snapshot in (run / "snapshots").glob("step-*"):
        shutil.rmtree(snapshot)
    done = paceline.run("resume", run, "--on", "here")
    assert done.code == 0, done.err
    assert "There is no snapshot in" in done.out
    assert "the training starts from the beginning" in done.out
    assert summary(run)["epochs"] == 3


@pytest.mark.slow
def test_the_same_command_again_starts_resumes_and_has_nothing_to_do(
    paceline: Paceline, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    short = "train digits --epochs 12 --shards 4 --snapshot-every-steps 5".split()
    whole = paceline.run(*short, "--workers", "1", "--run-dir", "whole")
    assert whole.code == 0, whole.err
    command = [*short, "--workers", "2", "--name", "first", "--run-dir", str(run), "--resume"]
    process = paceline.start(*command)
    wait_for_step(run, 20)
    process.kill()
    assert paceline.finish(process).code == -signal.SIGKILL
    done = paceline.run(*command)
    assert done.code == 0, done.err
    assert summary(run)["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]
    reasons = [start["reason"] for start in json.loads((run / "run.json").read_text())["history"]]
    assert reasons == ["start", "resume"]
    again = paceline.run(*command)
    assert (again.code, "has finished" in again.out) == (0, True)
    other = paceline.run("train", "synthetic", "--run-dir", str(run), "--resume")
    assert (other.code, "digits, not of the recipe synthetic" in other.err) == (2, True)


@pytest.mark.slow
def test_a_script_is_run_again_with_its_arguments(paceline: Paceline, tmp_path: Path) -> None:
    write_script(tmp_path)
    write_script(tmp_path, at_step(9, 1, "os.kill(os.getppid(), signal.SIGKILL)"), name="killed.py")
    whole = paceline.run("run", "own.py", "--workers", "2", "--run-dir", "whole")
    assert whole.code == 0, whole.err
    command = "run killed.py --workers 2 --run-dir run --resume --max-restarts 0".split()
    command += "--snapshot-every-steps 3 -- -v".split()
    assert paceline.run(*command).code != 0
    done = paceline.run(*command)
    assert done.code == 0, done.err
    one, two = summary(tmp_path / "whole"), summary(tmp_path / "run")
    assert one["weights_sha256"] == two["weights_sha256"]
    described = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [start["reason"] for start in described["history"]] == ["start", "resume"]
    assert described["script_args"] == ["-v"]
