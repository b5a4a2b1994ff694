"""Trainings on pretend devices come to their end, and to the right one."""

import json
from pathlib import Path

import pytest

from tests.pretend_gpu.counters import counted_by_all
from tests.pretend_gpu.host import Host

pytestmark = pytest.mark.pretend_gpu

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F
import paceline

with paceline.session() as s:
    torch.manual_seed(1)
    images, labels = torch.randn(96, 1, 8, 8), torch.arange(96) % 4
    model = s.model(nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)
    ))
    optimizer = s.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = s.loader(torch.utils.data.TensorDataset(images, labels), global_batch=16)
    for epoch in s.epochs(2):
        for inputs, targets in loader:
            assert inputs.device.type == "cuda", inputs.device
            s.step(F.cross_entropy(model(inputs), targets))
    total = sum(p.detach().double().sum() for p in model.parameters())
    print("weights", repr(float(total)))
"""


def summary(run: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((run / "summary.json").read_text())
    return found


@pytest.mark.parametrize("devices", [1, 2])
def test_a_recipe_trains_on_every_device(gpus: Host, devices: int, tmp_path: Path) -> None:
    counters = tmp_path / "counters"
    counters.mkdir()
    done = gpus.paceline(
        *("train", "digits", "--run-dir", "run", "--epochs", "3", "--progress", "off"),
        directory=tmp_path,
        devices=devices,
        PRETEND_GPU_COUNTERS=str(counters),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # It learns: the arithmetic is done, and collectives carry what they have to.
    assert summary(tmp_path / "run")["best_val_accuracy"] > 0.85  # type: ignore[operator]
    used = counted_by_all(counters)
    assert len(used) == devices
    assert all(each["convolutions"] > 0 for each in used)
    assert all((each["collectives"] > 0) == (devices > 1) for each in used)


def test_with_shards_one_device_and_two_give_the_same_bits(gpus: Host, tmp_path: Path) -> None:
    weights = []
    for devices in (1, 2):
        done = gpus.paceline(
            *("train", "digits", "--run-dir", f"on{devices}", "--shards", "4", "--epochs", "1"),
            directory=tmp_path,
            devices=devices,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        weights.append(summary(tmp_path / f"on{devices}")["weights_sha256"])
    assert weights[0] == weights[1]


def test_workers_that_share_a_device_give_the_same_bits(gpus: Host, tmp_path: Path) -> None:
    weights = set()
    for workers in (1, 3):
        done = gpus.paceline(
            *("train", "digits", "--run-dir", f"by{workers}", "--shards", "4", "--epochs", "1"),
            *("--device", "cuda", "--backend", "gloo", "--workers", str(workers)),
            directory=tmp_path,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        weights.add(summary(tmp_path / f"by{workers}")["weights_sha256"])
    assert len(weights) == 1


@pytest.mark.parametrize("devices", [1, 2])
def test_a_script_trains_on_every_device(gpus: Host, devices: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    done = gpus.paceline("run", "train.py", directory=tmp_path, devices=devices)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Pretend H100" in done.stdout
    assert "weights" in done.stdout
