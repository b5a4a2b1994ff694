"""What a training says of its GPU's time and memory is what the device itself knows."""

import csv
import json
import os
from collections.abc import Mapping
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
    # Clocks are compared: another process that takes the cores in between is measured as well.
    is_quiet = os.getloadavg()[0] < (os.cpu_count() or 1)
    share, utilization = (0.1, 0.1) if is_quiet else (0.5, 0.3)
    for attempt in range(4):
        known, found = _trained(gpus, tmp_path, f"run-{attempt}")
        assert found["memory_bytes"] > 0
        if (
            found["data_s"] == pytest.approx(known["data_s"], rel=share)
            and found["profiled_s"] == pytest.approx(known["data_s"], rel=2 * share)
            and found["utilization"] == pytest.approx(known["busy"], abs=utilization)
        ):
            return
    raise AssertionError(f"the device knows {known}, the training says {found}")


def _trained(
    gpus: Host, directory: Path, run_dir: str
) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Train. Returns what the device knows, and what the training says."""
    done = gpus.paceline(
        *("run", "train.py", "--run-dir", run_dir, "--loader-workers", "1"),
        directory=directory,
        PRETEND_GPU_LAUNCH_MS="1.5",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.removeprefix("KNOWN ") for line in done.stdout.splitlines() if "KNOWN" in line]
    with (directory / run_dir / "metrics.csv").open() as file:
        *_, row = csv.DictReader(file)
    profile = json.loads((directory / run_dir / "profile.json").read_text())
    found = {
        "data_s": float(row["data_time_s"]),
        "profiled_s": profile["parts"]["data"],
        "utilization": float(row["gpu_utilization"]),
        "memory_bytes": float(row["gpu_memory_bytes"]),
    }
    return json.loads(said[-1]), found
