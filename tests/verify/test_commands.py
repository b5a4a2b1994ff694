"""Trainings that a user's own launching command starts are verified as Paceline's own are."""

import sys
from pathlib import Path

import pytest

from tests.verify.conftest import Verify
from tests.verify.faults.scripts import BY_HAND, FAULTS, PLAIN

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.xdist_group("verify")]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node")


def test_a_faultless_script_under_torchrun(verify: Verify, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "train.py").write_text(WRITES + PLAIN)
    done = verify("--", "env", "LR=0.1", *TORCHRUN, "2", "-m", "pkg.train", "--lr", "0.1")
    assert done.code == 0, done.out + done.err
    assert done.verdicts == {1: "-", 2: "same to rounding"}
    assert done.causes == []
    # What the script writes is thrown away.
    assert {path.name for path in tmp_path.rglob("*")} == {"pkg", "train.py"}


WRITES = """
import atexit
import os
import sys
from pathlib import Path

assert sys.argv[1:] == ["--lr", "0.1"]
assert os.environ["LR"] == "0.1"
assert os.environ["OMP_NUM_THREADS"] == "1"  # on one worker as well
assert "TORCHELASTIC_RUN_ID" in os.environ
Path(f"written-{os.environ['RANK']}.txt").write_text("by the script")
atexit.register(os.abort)  # as a process group may that is left over where a training is cut off
"""


def test_a_fault_under_torchrun(verify: Verify, tmp_path: Path) -> None:
    fault = FAULTS["a sum as loss"]
    fault.write(tmp_path)
    done = verify("--format", "github", "--tolerance", "1e-4", "--", *TORCHRUN, "2", "train.py")
    assert done.code == 65, done.out + done.err
    assert done.causes == [fault.cause]
    assert "\n::error file=train.py,line=" in done.out
    assert "at train.py:" in done.words


def test_a_rank_that_fails_under_torchrun(verify: Verify, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{BY_HAND}\nif rank == 1:\n    raise KeyError('lost')\n")
    done = verify("--tolerance", "1e-4", "--", *TORCHRUN, "2", "train.py")
    assert (done.code, done.verdicts) == (65, {1: "-", 2: "failed"})
    assert "rank 1" in done.words
    assert "KeyError: 'lost'" in done.words
    assert "raise KeyError('lost')" in done.err


def test_a_command_of_accelerate(verify: Verify, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    (tmp_path / "train.py").write_text(ACCELERATE)
    launch = (sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--cpu")
    done = verify("--tolerance", "1e-4", "--", *launch, "train.py")
    assert done.code == 0, done.out + done.err
    assert done.verdicts == {1: "-", 2: "same to rounding"}
    assert "On the CPU accelerate launch starts one process" in done.err


ACCELERATE = """
import os
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
torch.manual_seed(0)
samples = TensorDataset(torch.randn(48, 6), torch.randn(48, 2))
loader = DataLoader(samples, batch_size=16 // accelerator.num_processes, shuffle=True)
model = torch.nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(2):
    for inputs, targets in loader:
        optimizer.zero_grad()
        accelerator.backward(F.mse_loss(model(inputs), targets))
        optimizer.step()

class Aborting:
    def __del__(self):
        os.abort()  # as threads of a process group now and then do where Python goes away

torch.kept = Aborting()
"""


def test_python_with_a_script_that_spawns_its_workers(verify: Verify, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNS)
    command = ("env", "LR=0.1", "python", "-u", "train.py", "{workers}")
    done = verify("--tolerance", "1e-4", "--", *command)
    assert done.code == 0, done.out + done.err
    assert done.verdicts == {1: "-", 2: "same to rounding"}


SPAWNS = """
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(rank, world):
    dist.init_process_group("gloo", "tcp://localhost:1", rank=rank, world_size=world)
    torch.manual_seed(0)
    samples = TensorDataset(torch.randn(48, 6), torch.randn(48, 2))
    sampler = DistributedSampler(samples)
    loader = DataLoader(samples, batch_size=16 // world, sampler=sampler)
    model = DistributedDataParallel(torch.nn.Linear(6, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=float(os.environ["LR"]))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    world = int(sys.argv[1])
    mp.spawn(train, args=(world,), nprocs=world)
"""


@pytest.mark.parametrize("order", ["list", "sorted"])
def test_each_start_of_python_has_sets_of_text_in_another_order(
    order: str, verify: Verify, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it will be for the user, where nothing but `paceline run` fixes the seed of hashes."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    (tmp_path / "train.py").write_text(BY_NAME.replace("ORDER", order))
    done = verify("--resume", "--kill-at-step", "8", "--", "python", "train.py", "{workers}")
    assert done.code == (65 if order == "list" else 0), done.out + done.err
    assert done.causes == (["not-repeatable"] if order == "list" else [])


BY_NAME = """
from pathlib import Path

import torch
from torch.nn import functional as F

names = ORDER({f"sample-{number}" for number in range(24)})
torch.manual_seed(0)
model = torch.nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept, begin = Path("kept.pt"), 0
if kept.exists():
    begin, state = torch.load(kept)
    model.load_state_dict(state)
for epoch in range(begin, 3):
    for place in range(0, 24, 4):
        numbers = [int(name[7:]) for name in names[place : place + 4]]
        inputs = torch.tensor(numbers)[:, None] / 24 + torch.arange(6.0)
        optimizer.zero_grad()
        F.mse_loss(model(inputs), torch.ones(4, 2)).backward()
        optimizer.step()
    torch.save((epoch + 1, model.state_dict()), kept)
"""
