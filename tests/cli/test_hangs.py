"""Workers that hang or lag in real trainings: named, ended, started again with the same result."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from paceline.errors import ExitCode
from tests.cli.conftest import Paceline, summary, wait_until
from tests.launch.waiting import patient

pytestmark = pytest.mark.ranks

_SLOW_EVALUATION = """
import time
import torch, paceline
from torch import nn

data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 1))

def judge(batch):
    if s.rank == 1:
        time.sleep(1)
    return {"loss": (model(batch[0]) - batch[1]).square().mean()}

with paceline.session() as s:
    model = nn.Linear(4, 1)
    model, optimizer, train, test = s.prepare(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        torch.utils.data.DataLoader(data, batch_size=8, shuffle=True),
        torch.utils.data.DataLoader(data, batch_size=2),
    )
    for epoch in s.epochs(1):
        for x, y in train:
            s.step((model(x) - y).square().mean())
        s.evaluate(judge, test)
"""


@pytest.mark.slow
@pytest.mark.xfail(
    strict=True,
    reason="the others wait in a collective with a timeout; the new core waits outside of one",
)
def test_a_worker_that_evaluates_a_batch_a_second_doesnt_hang(
    paceline: Paceline, tmp_path: Path
) -> None:
    (tmp_path / "slow.py").write_text(_SLOW_EVALUATION)
    words = ("--workers", "2", "--timeout-s", "5", "--max-restarts", "0", "--run-dir", "r")
    done = paceline.run("run", "slow.py", *words)
    assert done.code == 0, done.err


_SCRIPT = """
import os, signal, sys, time
import torch, paceline
from torch import nn
from torch.nn import functional as F

faults = sys.argv[1].split(",")
attempt = int(os.environ.get("PACELINE_ATTEMPT") or os.environ["TORCHELASTIC_RESTART_COUNT"])
fault = faults[attempt] if attempt < len(faults) else ""
generator = torch.Generator().manual_seed(1)
data = torch.utils.data.TensorDataset(
    torch.randn(256, 16, generator=generator), torch.randint(0, 4, (256,), generator=generator)
)

def collate(items):
    if fault == "slow data" and s.rank == 1:
        time.sleep(0.06)
    return torch.utils.data.default_collate(items)

def judge(batch):
    if s.rank == 1 and fault == "long evaluation":
        time.sleep(2.5)
    return {"loss": F.cross_entropy(model(batch[0]), batch[1])}

with paceline.session() as s:
    model = s.model(nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 4)))
    s.optimizer(torch.optim.SGD(model.parameters(), lr=0.05))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True, collate_fn=collate)
    batches = s.loader(loader)
    validation = s.eval_loader(data, batch_size=128)
    for epoch in s.epochs():
        step = 0
        for x, y in batches:
            if s.step(F.cross_entropy(model(x), y)):
                step += 1
                if epoch == 1 and step == 5 and s.rank == 1 and fault == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if epoch == 1 and step == 5 and s.rank != 1 and fault == "skip":
                    s.barrier()
        s.evaluate(judge, validation)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT)
    return path


@pytest.mark.slow
def test_a_hang_and_a_long_evaluation(paceline: Paceline, script: Path, tmp_path: Path) -> None:
    command = "--epochs 3 --shards 4 --loader-workers 0 --hang-after-s 1 --timeout-s 60".split()
    run, calm = tmp_path / "run", tmp_path / "calm"
    faults = "stop,long evaluation"
    done = paceline.run("run", script, "--workers", "3", *command, "--run-dir", run, "--", faults)
    assert done.code == 0, done.err
    (text,) = done.err.split("The training hangs: no progress")[1:]
    assert "Missing is rank 1 on " in text
    assert "\nThese wait:\n  rank 0 on " in text
    assert "script.py:" in text
    assert "so far 1 restart" in text
    assert (run / "logs" / "hang-0.txt").exists()
    assert "its process is stopped" in text
    alone = ["--workers", "1", *command, "--run-dir", str(calm), "--", ""]
    assert paceline.run("run", script, *alone).code == 0
    assert summary(run)["weights_sha256"] == summary(calm)["weights_sha256"]


@pytest.mark.slow
def test_a_call_on_some_workers_alone_is_not_tried_again(
    paceline: Paceline, script: Path, tmp_path: Path
) -> None:
    command = "--epochs 3 --shards 4 --loader-workers 0 --hang-after-s 1 --timeout-s 60".split()
    run = tmp_path / "run"
    done = paceline.run(
        "run", script, "--workers", "3", *command, "--run-dir", run, "--", "skip,skip"
    )
    assert done.code == ExitCode.JOB, done.err
    assert "in another collective than the others" in done.err
    assert "Make the same calls on every worker" in done.err
    assert "start again" not in done.out + done.err


@pytest.mark.skipif(sys.platform != "linux", reason="workers are watched from beside on Linux")
@pytest.mark.slow
def test_a_hang_under_torchrun(paceline: Paceline, script: Path, tmp_path: Path) -> None:
    environment = {"PACELINE_HANG_AFTER_S": "1", "PACELINE_EPOCHS": "3", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--max-restarts", "1", str(script), "stop"),
        ],
        cwd=tmp_path,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=patient(120),
        check=False,
    )
    assert process.returncode == 0, process.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert process.stderr.count("The training hangs") == 1, process.stderr
    assert "Missing is rank 1 on " in process.stderr
    assert "stopped by a signal" in process.stderr
    assert "  rank 0 on " in process.stderr
    assert (run / "logs" / "hang-0.txt").exists()
    assert summary(run)["epochs"] == 3
    left = {path.name for path in (run / "logs").iterdir()}
    assert left == {"rank-0.log", "rank-1.log", "hang-0.txt", "failure-rank-1.json"}
    watching = [p for p in psutil.process_iter(["cmdline"]) if str(run) in str(p.info["cmdline"])]
    assert watching == []


@pytest.mark.slow
def test_a_straggler_is_named(paceline: Paceline, script: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Watched every half second, so that half a minute's looks take a quarter.
    command = "--workers 2 --loader-workers 0 --epochs 40 --hang-after-s 5".split()
    training = paceline.start("run", script, *command, "--run-dir", run, "--", "slow data")

    def named() -> bool:
        log = run / "logs" / "rank-0.log"
        return log.exists() and "keeps the other workers waiting" in log.read_text()

    wait_until(named, "a straggler in the log")
    training.terminate()
    done = paceline.finish(training)
    assert "rank 1 on " in done.err
    assert "waits long for its data and keeps the other workers waiting" in done.err
