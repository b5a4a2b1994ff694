"""What a training says of its GPU's time and memory is what the device itself knows."""

import csv
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.launch.waiting import patient
from tests.pretend_gpu.build import build, environment

pytestmark = pytest.mark.pretend_gpu

# The device is busy for half of the time, and waits for every other batch. Time passes on a clock
# that no other process of this machine moves.
SLOW_DATA = """
import ctypes, json, time
import torch
from torch import nn
import paceline

device = ctypes.CDLL(None)
idle_ms, pass_ms = device.pretend_gpu_idle_ms, device.pretend_gpu_pass_ms
idle_ms.restype = ctypes.c_double
pass_ms.argtypes = [ctypes.c_double]

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        if index % 8 == 0:
            pass_ms(60)
        return torch.full((8,), index / 1000), index % 2

if __name__ == "__main__":
    with paceline.session(run_dir="run", loader_workers=0) as s:
        torch.manual_seed(1)
        model = s.model(nn.Linear(8, 2))
        s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = s.loader(Slow(), global_batch=4, shuffle=False)
        for epoch in s.epochs(2):
            begun_s, begun_ms, data_ms = time.perf_counter(), idle_ms(), 0.0
            before_ms = begun_ms
            for inputs, targets in loader:
                data_ms += idle_ms() - before_ms
                s.step(nn.functional.cross_entropy(model(inputs), targets))
                before_ms = idle_ms()
                time.sleep(0.01)  # by the machine's clock, by which utilization is sampled
            took_s = time.perf_counter() - begun_s
            busy = 1 - (idle_ms() - begun_ms) / 1000 / took_s
            known = {"data_s": data_ms / 1000 / 250, "busy": busy, "step_s": took_s / 250}
            print("KNOWN", json.dumps(known))
"""


def test_times_of_steps_and_utilization_are_the_devices_own(tmp_path: Path) -> None:
    known, found = _trained(tmp_path)
    assert known["busy"] == pytest.approx(0.5, abs=0.2)  # else it shows little
    assert found["data_s"] == pytest.approx(known["data_s"], rel=0.1)
    assert found["profiled_s"] == pytest.approx(known["data_s"], rel=0.1)
    assert found["step_s"] == pytest.approx(known["step_s"], rel=0.1)
    assert found["utilization"] == pytest.approx(known["busy"], rel=0.1)
    assert found["memory_bytes"] > 0


def _trained(directory: Path) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Train. Returns what the device knows, and what the training says."""
    (directory / "train.py").write_text(SLOW_DATA)
    # A process of its own: Paceline takes the clock as it is imported.
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=directory,
        env=environment(build(), PRETEND_GPU_LAUNCH_MS="1.5", PRETEND_GPU_CLOCK="own"),
        capture_output=True,
        text=True,
        check=False,
        timeout=patient(120.0),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = [line.removeprefix("KNOWN ") for line in done.stdout.splitlines() if "KNOWN" in line]
    with (directory / "run" / "metrics.csv").open() as file:
        *_, row = csv.DictReader(file)
    profile = json.loads((directory / "run" / "profile.json").read_text())
    found = {
        "data_s": float(row["data_time_s"]),
        "profiled_s": profile["parts"]["data"],
        "step_s": profile["step_s"]["median"],
        "utilization": float(row["gpu_utilization"]),
        "memory_bytes": float(row["gpu_memory_bytes"]),
    }
    return json.loads(said[-1]), found
