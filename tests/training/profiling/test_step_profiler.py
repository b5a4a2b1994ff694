"""Where a worker's time goes, as its note tells it to whoever watches from outside."""

import time
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.distributed.group import Group
from paceline.launch.heartbeat import Reading, read_note
from paceline.options.fields import OptionValue
from tests.support.ranks import run_ranks
from tests.support.sessions import session_on

pytestmark = pytest.mark.ranks

_SLOW_S = 0.02


class Slow(nn.Module):
    """Takes its time on rank 1."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def forward(self, inputs: Tensor) -> Tensor:
        if self.rank == 1:
            time.sleep(_SLOW_S)
        return inputs


def _train(group: Group, directory: Path, shards: int | None) -> tuple[Reading, Reading]:
    settings: dict[str, OptionValue] = {} if shards is None else {"shards": shards}
    path = directory / f"note-{group.rank}"
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(64, 4, generator=generator), torch.zeros(64).long())
    with session_on(group, directory / "run", settings) as s:
        s.engine.note.share(path)
        model = s.model(nn.Sequential(nn.Linear(4, 3), Slow(group.rank)))
        s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = s.loader(data, global_batch=8)
        begun = read_note(path)
        for _ in s.epochs(2):
            for batch in batches:
                inputs, targets = cast(tuple[Tensor, Tensor], batch)
                assert read_note(path).operation == "step"
                s.step(F.cross_entropy(model(inputs), targets))
            assert read_note(path).operation == "script"
        return begun, read_note(path)


@pytest.mark.parametrize("shards", [None, 2])
def test_waiting_is_told_from_computing(tmp_path: Path, shards: int | None) -> None:
    told = run_ranks(2, _train, tmp_path, shards)
    (begun0, fast), (begun1, slow) = told
    assert begun0.collectives == begun1.collectives
    assert fast.collectives == slow.collectives  # all workers count alike
    assert fast.collectives - begun0.collectives > 2 * 8
    assert (fast.step, fast.steps, slow.steps) == (16, 16, 16)
    assert fast.waiting_s > 0.5 * 16 * _SLOW_S
    assert slow.waiting_s < fast.waiting_s
    assert slow.total_s - slow.waiting_s - slow.data_s > 0.5 * 16 * _SLOW_S


def test_a_worker_alone_waits_for_nobody(tmp_path: Path) -> None:
    ((_, reading),) = run_ranks(1, _train, tmp_path, None)
    assert reading.steps == 16
    assert reading.waiting_s == 0.0
    assert reading.collective == ""
