"""What goes wrong inside a training: root cause whole, exit code 65, nothing lost."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import ExitCode
from tests.cli.conftest import Paceline, newest_step, summary
from tests.support.idx_files import write_mnist
from tests.support.needs import MEMORY_DISK, need

pytestmark = pytest.mark.ranks


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "failing.py"
    path.write_text(_FAILING)
    return path


def test_the_failing_workers_traceback_is_whole(
    paceline: Paceline, recipe: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = paceline.run("train", f"{recipe}:build", "--boom-at", "40", "--run-dir", run)
    assert done.code == ExitCode.JOB
    assert "The training failed on rank 1 (" in done.err
    assert "step 37" in done.err
    assert 'raise ValueError("boom")' in done.err
    assert done.err.count("Traceback (most recent call last)") == 1
    assert "Other workers:\n  rank 0 (" in done.err
    assert f"paceline resume {run}" in done.err
    assert newest_step(run) == 29
    assert "boom" in (run / "report.html").read_text()
    assert "Traceback" in (run / "logs" / "rank-1.log").read_text()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("os._exit", "ended its process with exit code 0 before the end of the training"),
        ("sys.exit", "SystemExit: 0"),
    ],
)
@pytest.mark.parametrize("where", ["build", "forward"])
@pytest.mark.core_cases(2)
def test_a_worker_that_leaves_with_exit_code_0(
    paceline: Paceline, recipe: Path, tmp_path: Path, how: str, words: str, where: str
) -> None:
    command = ("train", f"{recipe}:build", "--leave-in", where, "--leave-by", how)
    done = paceline.run(*command, "--run-dir", tmp_path / "run")
    assert done.code == ExitCode.JOB, done.err
    assert "The training failed" in done.err
    assert "rank 1 (" in done.err
    assert words in done.err
    assert "start again" not in done.out + done.err


def test_a_lone_worker_that_leaves_with_exit_code_0(paceline: Paceline, tmp_path: Path) -> None:
    script = tmp_path / "leaving.py"
    script.write_text("import os\nimport paceline\n\nwith paceline.session():\n    os._exit(0)\n")
    done = paceline.run("run", "--workers", "1", script)
    assert done.code == ExitCode.JOB, done.err
    assert "rank 0 (" in done.err
    assert "ended its process with exit code 0 before the end of the training" in done.err


@pytest.mark.slow
def test_an_evaluation_on_one_worker_alone(paceline: Paceline, tmp_path: Path) -> None:
    script = tmp_path / "alone.py"
    script.write_text(_EVALUATED_ALONE)
    done = paceline.run("run", "--workers", "2", script)
    assert done.code == ExitCode.JOB, done.err
    line = _EVALUATED_ALONE.splitlines().index("        s.evaluate(judge, validation)") + 1
    assert "rank 0 on " in done.err
    assert f"alone.py:{line} in <module>" in done.err
    assert "was in s.evaluate(...) (operation evaluate, step 4)" in done.err
    assert "was in the exchange at the end of the epoch (operation epoch end, step 4)" in done.err
    assert "Make the same calls on every worker" in done.err
    assert "gloo" not in done.err
    assert "start again" not in done.out + done.err


def test_a_script_that_leaves_its_session_on_one_worker(paceline: Paceline, tmp_path: Path) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(_LEAVING)
    done = paceline.run("run", "--workers", "2", script)
    assert done.code == ExitCode.JOB, done.err
    assert "the script ended itself by sys.exit(0) before the end of the training" in done.err
    assert "start again" not in done.out + done.err


def test_a_loss_that_becomes_nan(paceline: Paceline, recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = paceline.run("train", f"{recipe}:build", "--nan-at", "40", "--run-dir", run)
    assert done.code == ExitCode.JOB
    assert "became NaN or infinite at epoch 2, step 37, on rank 1, for the training samples " in (
        done.err
    )
    assert "Traceback" not in done.err
    assert newest_step(run) == 29


def test_missing_data_leaves_no_run_directory(paceline: Paceline, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = "train mnist --no-download --data-dir nowhere --run-dir"
    done = paceline.run(*command.split(), run)
    assert done.code == ExitCode.JOB
    assert "train-images-idx3-ubyte is missing" in done.err
    assert "--download" in done.err
    assert "Traceback" not in done.err
    assert not run.exists()


def test_a_truncated_data_file(paceline: Paceline, tmp_path: Path) -> None:
    files = write_mnist(tmp_path / "files", train=50, test=20, gz=False)
    damaged = next(tmp_path.rglob("train-images-idx3-ubyte"))
    damaged.write_bytes(damaged.read_bytes()[:-100])
    done = paceline.run("train", "mnist", "--no-download", "--data-dir", files)
    assert done.code == ExitCode.JOB
    assert f"{damaged} can't be read" in done.err
    assert "Traceback" not in done.err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    path = tmp_path / "small"
    path.mkdir()
    need(MEMORY_DISK)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.slow
def test_a_full_disk_doesnt_stop_training_and_its_end_waits_for_room(
    paceline: Paceline, small_disk: Path
) -> None:
    run, filler = small_disk / "run", small_disk / "filler"
    command = "train digits --workers 2 --epochs 6 --target-accuracy none --run-dir"
    filler.write_bytes(b"x" * 480_000)
    process = paceline.start(*command.split(), run)
    assert process.stdout is not None
    shown = ""
    while "trying again for 30 s" not in shown:
        line = process.stdout.readline()
        assert line, f"it didn't try again: {shown}"
        shown += line
    filler.unlink()
    done = paceline.finish(process)
    assert done.code == 0, done.err
    found = summary(run)
    assert found["epochs"] == 6
    assert (run / "snapshots" / str(found["final_snapshot"])).is_dir()
    assert newest_step(run) == found["steps"]
    assert "could not be written: No space left on device" in shown
    assert "training goes on" in shown
    shutil.rmtree(run)


@pytest.mark.slow
def test_final_weights_that_are_nowhere_are_a_failure(
    paceline: Paceline, recipe: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    command = ("train", f"{recipe}:build", "--spoil", str(run / "snapshots"), "--timeout-s", "20")
    done = paceline.run(*command, "--run-dir", run)
    assert done.code == ExitCode.INFRASTRUCTURE, done.err
    assert "its final weights, of step 145, are in no snapshot" in done.err
    assert "Traceback" not in done.err
    assert "start again" not in done.out + done.err
    assert "Done" not in done.out
    assert not (run / "summary.json").exists()


_FAILING = '''
import os
import shutil
import sys
from torch import nn
import paceline
from paceline.data.digits import load_digits

class Net(nn.Module):
    def __init__(self, boom_at, nan_at, leave):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
        self.boom_at, self.nan_at, self.leave, self.calls = boom_at, nan_at, leave, 0
        self.rank = int(os.environ.get("RANK", 0))

    def forward(self, images):
        self.calls += 1
        if self.rank == 1 and self.calls == self.boom_at:
            raise ValueError("boom")
        if self.calls == 40:
            self.leave("forward")
        outputs = self.layers(images)
        bad = self.rank == 1 and self.calls == self.nan_at
        return outputs * float("nan") if bad else outputs

@paceline.recipe(epochs=5, global_batch=50)
def build(
    *, boom_at: int = 0, nan_at: int = 0, leave_in: str = "", leave_by: str = "", spoil: str = ""
) -> paceline.Job:
    """Fails on rank 1 when told to. One epoch is 29 steps and 4 evaluation batches."""
    def leave(place):
        if place == "forward" and spoil and os.environ.get("RANK") == "0":
            while os.path.isdir(spoil):  # a snapshot is being written there
                shutil.rmtree(spoil, ignore_errors=True)
            open(spoil, "w").close()  # no directory can be made there
        if place == leave_in and os.environ.get("RANK") == "1":
            sys.exit(0) if leave_by == "sys.exit" else os._exit(0)

    leave("build")
    train, test = load_digits()
    return paceline.Job(model=Net(boom_at, nan_at, leave), train=train, validation=test)
'''

_LEAVING = """
import sys
import torch
import paceline

data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
with paceline.session() as s:
    model = s.model(torch.nn.Linear(4, 1))
    s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = s.loader(data, global_batch=8)
    for epoch in s.epochs(3):
        for x, y in loader:
            if epoch == 1 and s.rank == 1:
                sys.exit(0)
            s.step(torch.nn.functional.mse_loss(model(x), y))
"""

_EVALUATED_ALONE = """
import torch, paceline
from torch import nn
from torch.nn import functional as F

data = torch.utils.data.TensorDataset(torch.ones(32, 4), torch.zeros(32, dtype=torch.long))

def judge(batch):
    return {"loss": F.cross_entropy(model(batch[0]), batch[1])}

s = paceline.session()
model = s.model(nn.Linear(4, 2))
s.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
batches = s.loader(torch.utils.data.DataLoader(data, batch_size=8))
validation = s.eval_loader(data, batch_size=16)
for epoch in s.epochs(2):
    for x, y in batches:
        s.step(F.cross_entropy(model(x), y))
    if s.is_main:
        s.evaluate(judge, validation)
"""
