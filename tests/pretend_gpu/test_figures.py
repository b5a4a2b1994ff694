"""What a training says of its GPU's time and memory is what the device itself knows."""

import csv
import json
from pathlib import Path

import pytest

from tests.pretend_gpu.host import Host

pytestmark = pytest.mark.pretend_gpu

# The device is busy for half of a step, and its host for little of it.
SLOW_DATA = """
import ctypes, json, time
import torch
from torch import nn
import paceline

device = ctypes.CDLL(None)
device.pretend_gpu_idle_ms.restype = ctypes.c_double
idle_ms = device.pretend_gpu_idle_ms

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        if index % 4 == 0:
            time.sleep(0.03)
        return torch.full((8,), index / 400), index % 2

with paceline.session() as s:
    torch.manual_seed(1)
    model = s.model(nn.Linear(8, 2))
    s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = s.loader(Slow(), global_batch=4, shuffle=False)
    for epoch in s.epochs(2):
        begun_s, begun_ms, data_ms = time.perf_counter(), idle_ms(), 0.0
        before_ms = None
        for inputs, targets in loader:
            inputs.mul_(1)  # a launch: what the device was idle until then is known now
            if before_ms is not None:
                data_ms += idle_ms() - before_ms
            s.step(nn.functional.cross_entropy(model(inputs), targets))
            before_ms = idle_ms()
        took_s = time.perf_counter() - begun_s
        idle = (idle_ms() - begun_ms) / 1000 / took_s
        known = {"data_s": data_ms / 1000 / 99, "busy": 1 - idle, "step_s": took_s / 100}
        print("KNOWN", json.dumps(known))
"""


def test_times_of_steps_and_utilization_are_the_devices_own(gpus: Host, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLOW_DATA)
    done = gpus.paceline(
        *("run", "train.py", "--run-dir", "run", "--loader-workers", "1"),
        directory=tmp_path,
        PRETEND_GPU_LAUNCH_MS="1.5",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.removeprefix("KNOWN ") for line in done.stdout.splitlines() if "KNOWN" in line]
    known = json.loads(said[-1])
    with (tmp_path / "run" / "metrics.csv").open() as file:
        *_, row = csv.DictReader(file)
    data_s = float(row["data_time_s"])
    assert 0.1 * known["step_s"] < known["data_s"] < 0.9 * known["step_s"]
    assert data_s == pytest.approx(known["data_s"], rel=0.1)
    assert float(row["gpu_utilization"]) == pytest.approx(known["busy"], abs=0.1)
    assert float(row["gpu_memory_bytes"]) > 0
    profile = json.loads((tmp_path / "run" / "profile.json").read_text())
    step = profile["parts"]
    assert step["data"] == pytest.approx(known["data_s"], rel=0.2)
