"""Devices that aren't as many as they seem, or that a process can't use."""

from pathlib import Path

import pytest

from tests.pretend_gpu.host import Host

pytestmark = pytest.mark.pretend_gpu
SHORT = ("--epochs", "1", "--progress", "off", "--run-dir", "run")

NOTEBOOK = """
import torch
import paceline

ASKED

def train():
    with paceline.session(progress="off") as s:
        model = s.model(torch.nn.Linear(2, 1))
        s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = s.loader(torch.utils.data.TensorDataset(torch.ones(8, 2)), global_batch=4)
        for _ in s.epochs(1):
            for (inputs,) in loader:
                s.step(model(inputs).square().mean())
        return [inputs.device.type, s.world_size]

print("gave", paceline.notebook_launcher(train, workers=2))
"""


def test_without_a_device_the_cpu_trains(gpus: Host, tmp_path: Path) -> None:
    done = gpus.paceline(
        *("train", "digits", *SHORT), directory=tmp_path, devices=0, PRETEND_GPU_NVML_DEVICES="0"
    )
    assert done.returncode == 0, done.stderr
    assert "CPU (" in (tmp_path / "run" / "run.json").read_text()


def test_a_gpu_in_slices_is_recounted_by_its_worker(gpus: Host, tmp_path: Path) -> None:
    seen = {"PRETEND_GPU_NVML_DEVICES": "2"}
    done = gpus.paceline("train", "digits", *SHORT, directory=tmp_path, devices=1, **seen)
    assert done.returncode == 2
    assert "the driver counts 2 GPUs and CUDA shows 1 of them" in done.stderr
    assert "--workers 1" in done.stderr
    again = (*SHORT[:-1], "again", "--workers", "1")
    done = gpus.paceline("train", "digits", *again, directory=tmp_path, devices=1, **seen)
    assert done.returncode == 0, done.stderr


def test_each_worker_has_a_slice_of_its_own(gpus: Host, tmp_path: Path) -> None:
    done = gpus.paceline(
        *("train", "digits", *SHORT),
        directory=tmp_path,
        CUDA_VISIBLE_DEVICES="MIG-one,MIG-two",
    )
    assert done.returncode == 0, done.stderr
    assert '"world_size": 2' in (tmp_path / "run" / "run.json").read_text()


def test_more_workers_than_devices_are_refused(gpus: Host, tmp_path: Path) -> None:
    done = gpus.paceline(
        *("train", "digits", *SHORT, "--workers", "3"), directory=tmp_path, devices=2
    )
    assert done.returncode == 2
    assert "--workers 3, but there are 2 GPUs here" in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_notebook_trains_on_all_devices(gpus: Host, tmp_path: Path) -> None:
    (tmp_path / "cell.py").write_text(NOTEBOOK.replace("ASKED", ""))
    done = gpus.python("cell.py", directory=tmp_path, devices=2)
    assert done.returncode == 0, done.stderr
    assert "gave [['cuda', 2], ['cuda', 2]]" in done.stdout


@pytest.mark.parametrize("module", ["torch.cuda", "torch.accelerator"])
def test_a_notebook_may_ask_whether_there_is_a_gpu(gpus: Host, tmp_path: Path, module: str) -> None:
    asked = f'print("asked", {module}.is_available())'
    (tmp_path / "cell.py").write_text(NOTEBOOK.replace("ASKED", asked))
    done = gpus.python("cell.py", directory=tmp_path, devices=2)
    assert done.returncode == 0, done.stderr
    assert "asked True" in done.stdout
    assert "gave [['cuda', 2], ['cuda', 2]]" in done.stdout


# As one that asks before it imports Paceline.
def test_a_notebook_that_has_asked_the_driver_is_told_what_to_do(
    gpus: Host, tmp_path: Path
) -> None:
    (tmp_path / "cell.py").write_text(NOTEBOOK.replace("ASKED", "torch.cuda.is_available()"))
    done = gpus.python("cell.py", directory=tmp_path, devices=2, PYTORCH_NVML_BASED_CUDA_CHECK="0")
    assert done.returncode == 1
    assert "import paceline before the first question" in done.stderr


def test_a_notebook_that_has_used_a_gpu_is_told_to_restart(gpus: Host, tmp_path: Path) -> None:
    used = NOTEBOOK.replace("ASKED", 'torch.ones(2, device="cuda")')
    (tmp_path / "cell.py").write_text(used)
    done = gpus.python("cell.py", directory=tmp_path, devices=2)
    assert done.returncode == 1
    assert "this process has used CUDA already" in done.stderr


def test_torchs_sanitizer_begins_in_the_workers(gpus: Host, tmp_path: Path) -> None:
    done = gpus.paceline(
        *("train", "digits", *SHORT), directory=tmp_path, devices=2, TORCH_CUDA_SANITIZER="1"
    )
    assert done.returncode == 0, done.stderr
