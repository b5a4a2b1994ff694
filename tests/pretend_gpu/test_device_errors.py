"""Errors of a GPU end a training, or start it again, by whose fault they are."""

import json
from pathlib import Path

import pytest

from tests.pretend_gpu.host import Host

pytestmark = pytest.mark.pretend_gpu

TRAIN = ("train", "digits", "--run-dir", "run", "--epochs", "1", "--progress", "off")


@pytest.mark.parametrize("fault", ["ecc", "launch"])
def test_a_broken_gpu_is_tried_again(gpus: Host, fault: str, tmp_path: Path) -> None:
    happened = tmp_path / "happened"
    done = gpus.paceline(
        *TRAIN,
        directory=tmp_path,
        PRETEND_GPU_FAULT=f"{fault}:device=0:at=300:once={happened}",
    )
    assert happened.exists()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All workers start again" in done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["restarts"], summary["epochs"]) == (1, 1)
    (path,) = (tmp_path / "run" / "logs").glob("attempt-0-failure-rank-*.json")
    failure = json.loads(path.read_text())
    assert (failure["kind"], failure["exit_code"]) == ("infrastructure", 70)
    assert "dmesg" in failure["traceback"].splitlines()[-1]


def test_the_jobs_own_fault_is_not(gpus: Host, tmp_path: Path) -> None:
    fault = "address:device=0:at=300"
    done = gpus.paceline(*TRAIN, directory=tmp_path, PRETEND_GPU_FAULT=fault)
    assert done.returncode == 65, done.stdout + done.stderr
    assert "an illegal memory access was encountered" in done.stderr
    assert "CUDA_LAUNCH_BLOCKING=1 to see the right one" in done.stderr
    assert "start again" not in done.stderr


def test_what_helps_where_memory_is_full(gpus: Host, tmp_path: Path) -> None:
    little = str(20 << 20)
    done = gpus.paceline(*TRAIN, directory=tmp_path, PRETEND_GPU_BYTES=little)
    assert done.returncode == 65, done.stdout + done.stderr
    figures, _, advice = done.stderr.partition("Tried to allocate ")[2].partition("\n")
    assert "MiB" in figures
    assert "--max-batch-per-worker N puts at most N samples through" in advice
