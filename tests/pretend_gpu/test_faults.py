"""What befalls a device or a worker ends the training as documented, and at once."""

import json
import re
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.launch.waiting import patient, until
from tests.pretend_gpu.host import Host

pytestmark = pytest.mark.pretend_gpu

FAILING = """
import torch
import paceline

with paceline.session(progress="off") as s:
    model = s.model(torch.nn.Linear(2, 1))
    s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = s.loader(torch.utils.data.TensorDataset(torch.ones(64, 2)), global_batch=4)
    for _ in s.epochs(1):
        for step, (inputs,) in enumerate(loader):
            if s.rank == 1 and step == 3:
                raise KeyError("no such thing")
            s.step(model(inputs).square().mean())
"""


SHORT = ("train", "digits", "--run-dir", "run", "--epochs", "2", "--progress", "off")


def train(
    gpus: Host, directory: Path, *options: str, **settings: str
) -> "subprocess.CompletedProcess[str]":
    """Train on two devices; what befalls one must not be waited for, and leaves no process."""
    begun_s = time.monotonic()
    done = gpus.paceline(*SHORT, *options, directory=directory, devices=2, **settings)
    assert time.monotonic() - begun_s < patient(90.0)
    until(lambda: not running_in(directory), 10.0)
    return done


def running_in(directory: Path) -> list[int]:
    """List the processes whose working directory it is."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == str(directory):
                found.append(process.pid)
    return found


def names(text: str, ranks: str) -> bool:
    """Tell whether a text names a worker's rank (any of these), host and step."""
    host = re.escape(socket.gethostname())
    return bool(re.search(rf"rank [{ranks}] (\(|on ){host}( \(.*\):|,) step \d", text))


def test_an_error_of_one_worker_does_not_wait_for_the_others(gpus: Host, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    begun_s = time.monotonic()
    done = gpus.paceline("run", "train.py", directory=tmp_path, devices=2)
    assert time.monotonic() - begun_s < patient(60.0)  # NCCL would wait for 300 s
    assert done.returncode == 65, done.stdout + done.stderr
    assert "failed on rank 1 (" in done.stderr
    assert "no such thing" in done.stderr


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("ecc", "uncorrectable ECC error encountered"),
        ("launch", "unspecified launch failure"),
        ("lost", "unknown error"),
    ],
)
def test_a_device_that_fails_once_costs_one_restart(
    gpus: Host, kind: str, says: str, tmp_path: Path
) -> None:
    fault = f"{kind}:device=1:at=1000:once={tmp_path / 'has happened'}"
    done = train(gpus, tmp_path, "--snapshot-every-steps", "5", PRETEND_GPU_FAULT=fault)
    assert (tmp_path / "has happened").exists()
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout + done.stderr
    assert any(names(line, "1") and says in line for line in told.splitlines()), told
    starts = json.loads((tmp_path / "run" / "run.json").read_text())["history"]
    assert [start["reason"] for start in starts] == ["start", "restart"]
    assert starts[1]["from_step"] > 0


def test_a_device_that_keeps_failing_ends_the_training(gpus: Host, tmp_path: Path) -> None:
    fault = "ecc:device=1:at=300"
    done = train(gpus, tmp_path, "--max-restarts", "1", PRETEND_GPU_FAULT=fault)
    assert done.returncode == 70, done.stdout + done.stderr
    assert "The training failed on rank 1 (" in done.stderr
    assert names(done.stderr, "1")
    assert "uncorrectable ECC error encountered" in done.stderr


def test_a_kernel_that_reads_elsewhere_is_the_jobs_fault(gpus: Host, tmp_path: Path) -> None:
    done = train(gpus, tmp_path, PRETEND_GPU_FAULT="address:device=0:at=1000")
    assert done.returncode == 65, done.stdout + done.stderr
    assert names(done.stderr, "0")
    # Whether torch or cuDNN, in its own words, is the first to notice.
    assert "A GPU kernel did something illegal" in done.stderr


def test_memory_that_is_full_names_the_option_that_helps(gpus: Host, tmp_path: Path) -> None:
    done = train(gpus, tmp_path, PRETEND_GPU_BYTES=str(3 << 20))
    assert done.returncode == 65, done.stdout + done.stderr
    assert names(done.stderr, "01")
    assert "out of memory" in done.stderr
    assert "--max-batch-per-worker" in done.stderr


@pytest.mark.parametrize(("kind", "at"), [("hang", 50), ("hang", 55), ("nccl", 27)])
def test_a_collective_that_never_ends_costs_one_restart(
    gpus: Host, kind: str, at: int, tmp_path: Path
) -> None:
    # A host runs ahead of its device, up to where figures are fetched from it; but DDP itself waits
    # for the device in its first ten steps, where only the collectives' timeout shows a hang.
    fault = f"{kind}:device=1:at={at}:once={tmp_path / 'has happened'}"
    options = ("--snapshot-every-steps", "5", "--hang-after-s", "5")
    done = train(gpus, tmp_path, *options, PRETEND_GPU_FAULT=fault)
    assert (tmp_path / "has happened").exists()
    assert done.returncode == 0, done.stdout + done.stderr
    starts = json.loads((tmp_path / "run" / "run.json").read_text())["history"]
    assert len(starts) == 2, done.stdout + done.stderr
    assert names(done.stderr, "1"), done.stderr
    if kind == "hang":
        assert "in device wait" in done.stderr
        assert "All wait for their GPUs: a kernel or a collective on them" in done.stderr


def test_a_collective_that_never_ends_ends_the_training_where_no_restart_is_allowed(
    gpus: Host, tmp_path: Path
) -> None:
    options = ("--max-restarts", "0", "--hang-after-s", "5")
    done = train(gpus, tmp_path, *options, PRETEND_GPU_FAULT="hang:device=1:at=50")
    assert done.returncode == 70, done.stdout + done.stderr
    assert names(done.stderr, "01"), done.stderr
    assert "in device wait" in done.stderr
