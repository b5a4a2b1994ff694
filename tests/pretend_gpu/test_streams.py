"""On late streams a missing wait reads what was there before; Paceline's own waits miss none."""

import json
from pathlib import Path

import pytest

from tests.pretend_gpu.host import Host

pytestmark = pytest.mark.pretend_gpu

# Each once as it should be and once with a wait, or the word to the allocator, left out.
CASES = """
import time
import torch

side, usual = torch.cuda.Stream(), torch.cuda.current_stream()
source = torch.full((1000,), 7.0, pin_memory=True)

def batch(waits):
    "A batch is copied on a side stream, and read on the usual one."
    target = torch.zeros(1000, device="cuda")
    side.wait_stream(usual)
    with torch.cuda.stream(side):
        target.copy_(source, non_blocking=True)
    if waits:
        usual.wait_stream(side)
    return (target * 1).sum().item() == 7000

def snapshot(waits):
    "Weights are copied to the host on a side stream, and updated on the usual one."
    weights, held = torch.ones(1000, device="cuda"), torch.zeros(1000, pin_memory=True)
    side.wait_stream(usual)
    with torch.cuda.stream(side):
        held.copy_(weights, non_blocking=True)
    if waits:
        usual.wait_stream(side)
    weights.add_(1)
    side.synchronize()
    return held.sum().item() == 1000

def read_on_the_host(waits):
    "What is copied to the host is read there."
    weights, held = torch.ones(1000, device="cuda"), torch.zeros(1000, pin_memory=True)
    side.wait_stream(usual)
    with torch.cuda.stream(side):
        held.copy_(weights, non_blocking=True)
        done = torch.cuda.Event()
        done.record()
    if waits:
        done.synchronize()
    return held.sum().item() == 1000

def computed(waits):
    "A side stream computes with what the usual one has made."
    factor = 3 if waits else 4
    with torch.cuda.stream(side):
        made = torch.ones(1000, device="cuda").mul_(factor)
    if waits:
        usual.wait_stream(side)
    return made.sum().item() == 1000 * factor

def freed(waits):
    "Memory that a side stream still reads is freed, and given to others."
    held = torch.zeros(1000, device="cuda")
    source = torch.full((1000,), 2.0, device="cuda")
    side.wait_stream(usual)
    with torch.cuda.stream(side):
        held.copy_(source, non_blocking=True)
    if waits:
        source.record_stream(side)
    del source
    torch.full((1000,), 5.0, device="cuda")
    side.synchronize()
    return held.sum().item() == 2000

def asked(waits):
    "Who asks often enough is told in the end."
    with torch.cuda.stream(side):
        torch.zeros(10, device="cuda").add_(1)
    return any(side.query() or time.sleep(0.001) for _ in range(5000))

for case in (batch, snapshot, read_on_the_host, computed, freed, asked):
    found = []
    for waits in (True, False):
        found.append(case(waits))
        torch.cuda.synchronize()  # what a missing wait has left would meet the next one's memory
    print(case.__name__, *found)
"""


@pytest.mark.parametrize(("streams", "without"), [("", "True"), ("late", "False")])
def test_what_late_streams_show(gpus: Host, streams: str, without: str, tmp_path: Path) -> None:
    (tmp_path / "cases.py").write_text(CASES)
    done = gpus.python("cases.py", directory=tmp_path, PRETEND_GPU_STREAMS=streams)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        *(f"{case} True {without}" for case in ("batch", "snapshot", "read_on_the_host")),
        *(f"{case} True {without}" for case in ("computed", "freed")),
        "asked True True",
    ]


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        (("--sync", "powersgd", "--precision", "fp16"), 2),
        (("--shards", "4", "--precision", "bf16"), 2),
        (("--snapshot-every-steps", "4"), 1),
    ],
    ids=["powersgd", "shards", "snapshots"],
)
def test_trainings_have_the_same_bits_on_late_streams(
    gpus: Host, words: tuple[str, ...], devices: int, tmp_path: Path
) -> None:
    weights = []
    for streams in ("", "late"):
        run = f"run{streams}"
        done = gpus.paceline(
            *("train", "digits", "--run-dir", run, "--epochs", "1", "--global-batch", "64"),
            *words,
            directory=tmp_path,
            devices=devices,
            PRETEND_GPU_STREAMS=streams,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        weights.append(json.loads((tmp_path / run / "summary.json").read_text())["weights_sha256"])
    assert weights[0] == weights[1]
