"""Copies between host and device are few, bring the right values, and hold nobody up."""

from pathlib import Path

import pytest

from tests.pretend_gpu.host import Host

pytestmark = pytest.mark.pretend_gpu


def test_what_copies_cost(gpus: Host, tmp_path: Path) -> None:
    done = gpus.python("-m", "tests.pretend_gpu.copies", directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        "fetch syncs 1 d2h 1 h2d 0 pageable 0",
        "send syncs 0 d2h 0 h2d 1 pageable 0",
        "copy syncs 0 d2h 0 h2d 0 pageable 0",
        "snapshot syncs 0 d2h 1 h2d 0 pageable 0",
        "batch syncs 0 d2h 0 h2d 2 pageable 0",
        "statistics syncs 0 d2h 0 h2d 0 pageable 0",
    ]


# An error in a step drops the generators of batches: what they held would be given back then.
HOLDING = """
import gc
import torch
from torch import nn
from torch.utils.data import TensorDataset
import paceline

def held():
    tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor]
    pinned = sum(t.is_pinned() for t in tensors if t.device.type == "cpu")
    return pinned, sum(tuple(t.shape) == (8, 1, 4, 4) for t in tensors if t.is_cuda)

with paceline.session(epochs=1) as s:
    model = s.model(nn.Sequential(nn.Flatten(), nn.Linear(16, 4)))
    s.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    data = TensorDataset(torch.randn(64, 1, 4, 4), torch.arange(64) % 4)
    loader = s.loader(data, global_batch=8)
    for epoch in s.epochs():
        for inputs, targets in loader:
            s.step(nn.functional.cross_entropy(model(inputs), targets))
            print("held", *held())
"""


@pytest.mark.parametrize("loaders", [0, 1])
def test_no_copied_memory_is_held_while_the_script_computes(
    gpus: Host, loaders: int, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(HOLDING)
    words = ("run", "train.py", "--loader-workers", str(loaders))
    done = gpus.paceline(*words, directory=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith("held")]
    assert len(found) == 8
    assert set(found) == {"held 0 1"}
