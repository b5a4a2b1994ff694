"""Trainings on pretend devices come to their end, and to the right one."""

import json
import re
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

# As PyTorch's tutorial has it: nothing of Paceline in it.
PLAIN = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

rank, device = int(os.environ["RANK"]), torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl")
torch.manual_seed(1)
images, labels = torch.randn(96, 1, 8, 8), torch.arange(96) % 4
net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)).to(device)
model = nn.parallel.DistributedDataParallel(net, device_ids=[device.index])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for start in range(0, 96, 16):
    mine = slice(start + rank, start + 16, dist.get_world_size())
    loss = F.cross_entropy(model(images[mine].to(device)), labels[mine].to(device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("weights", float(sum(p.detach().double().sum() for p in model.parameters())))
dist.destroy_process_group()
"""


def weights_of(text: str) -> list[float]:
    """Read the sums that a script has printed."""
    return [float(found) for found in re.findall(r"weights (\S+)", text)]


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


def test_a_script_of_its_own_trains_as_under_paceline_run(gpus: Host, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    alone = gpus.python("train.py", directory=tmp_path, devices=2)
    assert alone.returncode == 0, alone.stdout + alone.stderr
    run = gpus.paceline("run", "train.py", directory=tmp_path, devices=1)
    assert weights_of(alone.stdout) == weights_of(run.stdout) != []


def test_a_plain_ddp_script_trains_under_paceline_run(gpus: Host, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    found = []
    for devices in (1, 2):
        done = gpus.paceline("run", "train.py", directory=tmp_path, devices=devices)
        assert done.returncode == 0, done.stdout + done.stderr
        found += weights_of(done.stdout)
    assert found == pytest.approx([found[0]] * len(found), rel=1e-5)


@pytest.mark.parametrize("tf32", ["on", "off"])
def test_tf32_is_chosen(gpus: Host, tf32: str, tmp_path: Path) -> None:
    done = gpus.paceline(
        *("train", "digits", "--run-dir", "run", "--epochs", "1", "--tf32", tf32),
        directory=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    said = "TF32 in matrix products and convolutions" if tf32 == "on" else "no TF32"
    assert said in done.stdout


def test_the_start_says_what_was_chosen_and_what_would_be_faster(
    gpus: Host, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    chosen = ("--deterministic", "--tf32", "off", "--precision", "bf16")
    for options, kernels in (
        (
            (),
            "cuDNN's choice, TF32 in convolutions; faster: --precision bf16, fused=True in the "
            "optimizer",
        ),
        (chosen, "the same bits every time, no TF32; faster: fused=True in the optimizer"),
    ):
        done = gpus.paceline("run", "train.py", *options, directory=tmp_path)
        assert done.returncode == 0, done.stderr
        assert f"  kernels   {kernels}\n" in done.stdout
        assert "read in each worker, copied while the GPU computes" in done.stdout


# A gradient of other strides than its weight's is copied by DistributedDataParallel, which warns.
@pytest.mark.parametrize("reading", ["memory", "a loader"])
def test_gradients_of_one_channel_are_laid_out_as_weights_are(
    gpus: Host, reading: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("train", "digits", "--epochs", "1") if reading == "memory" else ("run", "train.py")
    done = gpus.paceline(*words, directory=tmp_path, devices=2)
    assert done.returncode == 0, done.stderr
    assert "2 workers" in done.stdout
    assert "strides" not in done.stderr


# What is compiled calls torch's own operators: the pretend device runs no generated kernels.
# When a gradient is complete, it is noted how many products and collectives there were.
COMPILED = """
import functools, json
import torch
from torch import nn
import paceline
from tests.pretend_gpu.counters import counted_here

torch.compile = functools.partial(torch.compile, backend="aot_eager")
with paceline.session() as s:
    torch.manual_seed(1)
    model = s.model(nn.Sequential(*(nn.Linear(1800, 1800, bias=False) for _ in range(6))))
    seen = []
    for p in model.parameters():  # 12.4 MiB each
        p.register_post_accumulate_grad_hook(lambda _: seen.append(counted_here()))
    s.optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    for step in s.steps(4):
        seen.clear()
        s.step(model(torch.ones(2, 1800, device=s.device)).square().mean())
    sent = [each["collectives"] - seen[0]["collectives"] for each in seen]
    later = [seen[-1]["products"] - each["products"] for each in seen]
    total = float(sum(p.detach().sum() for p in model.parameters()))
    print("FOUND", json.dumps([sent, later, total]))
"""


def test_a_compiled_models_gradients_leave_during_the_backward_pass(
    gpus: Host, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(COMPILED)
    weights = []
    for options in (("--compile",), ("--no-compile",)):
        done = gpus.paceline(*("run", "train.py"), *options, directory=tmp_path, devices=2)
        assert done.returncode == 0, done.stderr
        sent, later, found = json.loads(done.stdout.partition("FOUND ")[2].partition("\n")[0])
        weights.append(found)
        # There are products to come when the first bucket has left.
        assert any(n > 0 and left > 0 for n, left in zip(sent, later, strict=True)), (sent, later)
        assert ("  compile   on, cut where buckets of gradients end" in done.stdout) == (
            options == ("--compile",)
        )
    assert weights[0] == pytest.approx(weights[1], rel=1e-5)


# It is told to stop within an exchange, where it may wait for the device.
STOPPED = """
import os, signal
import torch
from torch import nn
import paceline

with paceline.session(progress="off") as s:
    model = s.model(nn.Linear(8, 2))
    s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = torch.utils.data.TensorDataset(torch.randn(160, 8), torch.arange(160) % 2)
    loader = s.loader(data, global_batch=4)
    for epoch in s.epochs(2):
        for step, (inputs, targets) in enumerate(loader):
            if (epoch, step) == (0, 20):
                os.kill(os.getpid(), signal.SIGTERM)
            s.step(nn.functional.cross_entropy(model(inputs), targets))
"""


_STOP = "os.kill(os.getpid(), signal.SIGTERM)"


@pytest.mark.parametrize(
    ("in_a_step", "ends"),
    [
        (_STOP, 75),
        ("model(inputs).sum().item()", 0),  # is the script's own
        ("torch.ones(8).to(inputs.device)", 65),
    ],
    ids=["signal", "fetch", "wait"],
)
def test_how_a_training_ends_whose_steps_may_not_wait(
    in_a_step: str, ends: int, gpus: Host, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(STOPPED.replace(_STOP, in_a_step))
    done = gpus.paceline(
        *("run", "train.py", "--run-dir", "run", "--on", "here"),
        directory=tmp_path,
        PRETEND_GPU_COUNTERS=str(tmp_path),
        PRETEND_GPU_WAITS="refused",
    )
    assert done.returncode == ends, done.stdout + done.stderr
    refused = "called a synchronizing CUDA operation" in done.stderr
    assert refused == (ends == 65) != (tmp_path / "run" / "summary.json").exists()
