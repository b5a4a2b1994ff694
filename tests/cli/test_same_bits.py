"""`--shards`: the same bits through crashes and changes of the number of workers."""

import random
import signal
from pathlib import Path

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

pytestmark = pytest.mark.ranks

_DIGITS = (
    "train digits --shards 8 --epochs 6 --target-accuracy none --snapshot-every-steps 5 "
    "--clip-norm 1"
).split()
_HASHES = ("weights_sha256", "state_sha256", "shards", "steps", "val_accuracy", "val_loss")


def hashes(run: Path) -> list[object]:
    return [summary(run)[name] for name in _HASHES]


def test_a_killed_and_resized_training_ends_with_the_same_bits(
    paceline: Paceline, tmp_path: Path
) -> None:
    alone, run = tmp_path / "alone", tmp_path / "run"
    done = paceline.run(*_DIGITS, "--workers", "1", "--run-dir", alone)
    assert done.code == 0, done.err

    process = paceline.start(*_DIGITS, "--workers", "3", "--run-dir", run)
    wait_for_step(run, random.Random(3).randint(5, 20))
    wait_until(lambda: len(workers_of(process)) == 3, "all workers run")
    workers_of(process)[2].kill()
    before = newest_step(run)
    wait_for_step(run, before + 20)  # restarted by itself
    for workers in (2, 4):
        process.send_signal(signal.SIGTERM)
        stopped = paceline.finish(process)
        assert stopped.code == ExitCode.RESUMABLE, stopped.err
        process = paceline.start("resume", run, "--workers", str(workers))
        wait_for_step(run, newest_step(run) + 15)
    done = paceline.finish(process)
    assert done.code == 0, done.err
    assert hashes(run) == hashes(alone)
    assert metrics_without_times(run) == metrics_without_times(alone)


@pytest.mark.slow
def test_without_shards_a_change_of_the_number_is_said(paceline: Paceline, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = paceline.start(
        *"train digits --workers 2 --epochs 15 --target-accuracy none".split(),
        *("--snapshot-every-steps", "5", "--run-dir", run),
    )
    wait_for_step(run, 30)
    process.send_signal(signal.SIGTERM)
    assert paceline.finish(process).code == ExitCode.RESUMABLE
    done = paceline.run("resume", run, "--workers", "3")
    assert done.code == 0, done.err
    assert "taken on 2 workers, and now there are 3" in done.out
    assert summary(run)["samples_seen"] == 15 * 1442


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--shards 2 --workers 3", "3 workers are more than --shards 2"),
        ("--shards 80", "80 shards are more than the 64 samples"),
        ("--shards 8 --batch-per-worker 16", "--shards needs --global-batch"),
        ("--shards 8 --sync-batchnorm", "--sync-batchnorm"),
        ("--shards 8 --time-budget 1m", "--time-budget"),
    ],
)
@pytest.mark.core_cases(2)
def test_what_cant_be_combined_is_refused_before_anything_starts(
    paceline: Paceline, tmp_path: Path, options: str, said: str
) -> None:
    run = tmp_path / "run"
    done = paceline.run("train", "digits", *options.split(), "--run-dir", run)
    assert done.code == ExitCode.USAGE, done.out + done.err
    assert said in done.err
    assert "Traceback" not in done.err


@pytest.mark.slow
def test_the_number_of_shards_belongs_to_the_training(paceline: Paceline, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = "train digits --shards 4 --workers 1 --epochs 1 --run-dir".split()
    assert paceline.run(*first, run).code == 0
    done = paceline.run("resume", run, "--shards", "2")
    assert done.code == ExitCode.USAGE
    assert "shards: the run has 4, you give 2" in done.err


@pytest.mark.slow
def test_bits_of_mixed_origin_are_told_apart(paceline: Paceline, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = "train digits --shards 5 --workers 1 --epochs 1 --target-accuracy none --run-dir"
    done = paceline.run(*first.split(), run)
    assert done.code == 0, done.err
    assert "global batch 64 in 5 shards of 12 or 13, the same bits on 1 to 5 workers" in done.out
    assert summary(run)["mixed_numerics"] is False
    assert "different hardware" not in done.out

    further = ("resume", run, "--allow-change", "epochs", "--epochs")
    refused = paceline.run(*further, "2", env={"NVIDIA_TF32_OVERRIDE": "0"})
    assert refused.code == ExitCode.JOB
    assert "NVIDIA_TF32_OVERRIDE: was not set, is 0" in refused.err
    assert "Go on from" not in refused.err  # by the very command that was refused

    done = paceline.run(*further, "2", "--threads", "1")
    assert done.code == 0, done.err
    assert summary(run)["mixed_numerics"] is False
    for epochs, more in (("3", ("--threads", "2", "--allow-different-hardware")), ("4", ())):
        done = paceline.run(*further, epochs, *more)
        assert done.code == 0, done.err
        assert summary(run)["mixed_numerics"] is True
        assert "the bits come from different hardware or settings" in done.out
