"""What befalls a device or a worker ends the training as documented, and at once."""

import time
from pathlib import Path

import pytest

from tests.launch.waiting import patient
from tests.pretend_gpu.host import Host

pytestmark = pytest.mark.pretend_gpu

FAILING = """
import torch
import paceline

with paceline.session(progress="off") as s:
    model = s.model(torch.nn.Linear(2, 1))
    s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    loader = s.loader(torch.utils.data.TensorDataset(torch.ones(64, 2)), global_batch=4)
    for _ in s.epochs(1):
        for step, (inputs,) in enumerate(loader):
            if s.rank == 1 and step == 3:
                raise KeyError("no such thing")
            s.step(model(inputs).square().mean())
"""


@pytest.mark.parametrize("started_by", ["paceline", "torchrun"])
def test_an_error_of_one_worker_does_not_wait_for_the_others(
    gpus: Host, started_by: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(FAILING)
    begun_s = time.monotonic()
    if started_by == "paceline":
        done = gpus.paceline("run", "train.py", directory=tmp_path, devices=2)
        assert done.returncode == 65, done.stdout + done.stderr
        assert "failed on rank 1 (" in done.stderr
        assert "no such thing" in done.stderr
    else:
        words = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py")
        done = gpus.python(*words, directory=tmp_path, devices=2)
        assert done.returncode == 1
        assert "KeyError: 'no such thing'" in done.stderr
    assert time.monotonic() - begun_s < patient(120.0)  # NCCL would wait for 300 s
