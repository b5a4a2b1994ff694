"""Training through the command line, on real input, with real workers."""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.results.metrics_table import COLUMNS
from tests.cli.conftest import Paceline, summary
from tests.launch.waiting import patient
from tests.support.idx_files import write_mnist

pytestmark = pytest.mark.ranks

_CONTRACT = [
    "recipe",
    "world_size",
    "nodes",
    "shards",
    "global_batch",
    "epochs",
    "steps",
    "samples_seen",
    "train_time_s",
    "images_per_s",
    "train_loss",
    "val_loss",
    "val_accuracy",
    "best_val_accuracy",
    "val_samples",
    "stopped_because",
    "weights_sha256",
]


def test_the_default_trains_to_its_target(cold_paceline: Paceline, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = cold_paceline.run("train", "--workers", "2", "--run-dir", run)
    assert done.code == 0, done.err
    found = summary(run)
    assert set(_CONTRACT) <= found.keys()
    assert found["stopped_because"] == "target"
    assert float(str(found["val_accuracy"])) >= 0.975
    assert (found["world_size"], found["val_samples"]) == (2, 355)
    with (run / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS
    assert len(rows) == found["epochs"]
    assert {p.name for p in run.iterdir()} >= {"run.json", "snapshots", "logs", "report.html"}
    assert (run / "logs" / "rank-0.log").is_file()
    assert (run / "logs" / "rank-1.log").is_file()
    # Nothing twice: each epoch is one line of the output, and of rank 0's log.
    for text in (done.out, (run / "logs" / "rank-0.log").read_text()):
        for row in rows:
            assert text.count(f"\n{row['epoch']:>5} {row['step']:>7} ") == 1
    assert done.err == ""


@pytest.mark.slow
def test_mnist_on_real_files_with_everything_on(paceline: Paceline, tmp_path: Path) -> None:
    write_mnist(tmp_path / "files", train=500, test=101)
    run = tmp_path / "run"
    options = (
        "--epochs 3 --lr 1.0 --no-download --label-smoothing 0.05 --clip-norm 5 --schedule cosine "
        "--warmup-steps 3 --max-batch-per-worker 20 --tensorboard --snapshot-every-steps 3 "
        "--lr-scaling linear --base-batch 64 --target-accuracy none --global-batch 70"
    )
    done = paceline.run(
        "train", "mnist", "--data-dir", tmp_path / "files", *options.split(), "--run-dir", run
    )
    assert done.code == 0, done.err
    found = summary(run)
    assert (found["epochs"], found["samples_seen"], found["val_samples"]) == (3, 1500, 101)
    assert float(str(found["val_accuracy"])) > 0.5
    assert "  lr        1.09375 = 1 x 70/64 (linear, base batch 64)" in done.out
    assert "in 2 micro-batches" in done.out
    assert any((run / "tensorboard").iterdir())
    record = json.loads((run / "run.json").read_text())
    assert record["recipe_arguments"]["data_dir"] == str(tmp_path / "files")
    assert {"lr", "epochs", "data_dir", "clip_norm"} <= set(record["given"])


def test_own_recipe_with_a_data_set_of_its_own(paceline: Paceline, tmp_path: Path) -> None:
    (tmp_path / "my_job.py").write_text(_OWN_RECIPE)
    run = tmp_path / "run"
    command = "train my_job.py:build --width 12 --epochs 2 --workers 2 --optimizer adamw --lr 0.01"
    done = paceline.run(*command.split(), "--run-dir", run)
    assert done.code == 0, done.err
    assert summary(run)["samples_seen"] == 2 * 67
    assert summary(run)["val_samples"] == 33
    assert "12 hidden" in (run / "logs" / "rank-1.log").read_text()


@pytest.mark.parametrize(
    "options", ["--precision bf16", "--precision fp16", "--sync-batchnorm", "--workers 3"]
)
@pytest.mark.slow
def test_variants(options: str, paceline: Paceline, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = f"train digits --epochs 3 --target-accuracy none {options}"
    done = paceline.run(*command.split(), "--run-dir", run)
    assert done.code == 0, done.err
    assert float(str(summary(run)["val_accuracy"])) > 0.8


@pytest.mark.slow
def test_a_time_budget_ends_in_time_and_fits_the_schedule(
    paceline: Paceline, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = "train digits --epochs 100000 --time-budget 4s --target-accuracy none"
    done = paceline.run(*command.split(), "--run-dir", run)
    assert done.code == 0, done.err
    found = summary(run)
    assert found["stopped_because"] == "time"
    with (run / "metrics.csv").open() as file:
        last = list(csv.DictReader(file))[-1]
    assert float(last["lr"]) < 0.01, "the cosine should have come down to the budget's end"


@pytest.mark.slow
def test_under_torchrun(paceline: Paceline, tmp_path: Path) -> None:
    command = "torch.distributed.run --nproc-per-node 2 -m paceline train digits --epochs 1"
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert summary(run)["world_size"] == 2
    assert done.stdout.count("Finished ") == 1


@pytest.mark.slow
def test_two_starts_at_once_train_in_directories_of_their_own(paceline: Paceline) -> None:
    short = ("train", "digits", "--epochs", "1", "--workers", "1", "--target-accuracy", "none")
    several = [paceline.start(*short) for _ in range(2)]
    finished = [paceline.finish(process) for process in several]
    assert [done.code for done in finished] == [0, 0], "".join(done.err for done in finished)
    runs = list((paceline.directory / "runs").iterdir())
    assert [summary(run)["epochs"] for run in runs] == [1, 1]
    assert {f"{run}/report.html" for run in runs} == {
        line.split()[-1] for done in finished for line in done.out.splitlines() if "report " in line
    }


@pytest.mark.slow
def test_in_one_plain_process(paceline: Paceline, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = paceline.run(*["train", "digits", "--on", "here", "--epochs", "1", "--run-dir"], run)
    assert done.code == 0, done.err
    assert summary(run)["world_size"] == 1


_OWN_RECIPE = '''
import torch
from torch import nn
import paceline

class Points(torch.utils.data.Dataset):
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __getitem__(self, index):
        return torch.randn(5) + index % 3, index % 3

@paceline.recipe(global_batch=10)
def build(*, width: int = 8) -> paceline.Job:
    """Three clouds of points."""
    print(width, "hidden")
    model = nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 3))
    return paceline.Job(model=model, train=Points(67), validation=Points(33), num_classes=3)
'''
