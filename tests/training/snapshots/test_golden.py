"""Snapshots that earlier versions have written, byte for byte, still load.

Each was taken on 2 workers after 10 of the 14 steps of `plain_loop`, by a SIGTERM. When a snapshot
gets a new field, one of the version before is added here.
"""

import shutil
from pathlib import Path

import pytest
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.distributed.group import Group
from tests.support.ranks import run_ranks
from tests.support.sessions import (
    BATCH,
    EPOCHS,
    assert_weights,
    net,
    pair_of,
    plain_loop,
    points,
    session_on,
    sgd,
    weights_of,
)

pytestmark = pytest.mark.ranks
GOLDEN = Path(__file__).parent / "golden"


def rest(group: Group, directory: Path) -> tuple[int, list[Tensor]]:
    """Resume, and train to the end; returns the steps that were left, and the weights."""
    with session_on(group, directory, {"epochs": EPOCHS, "global_batch": BATCH}) as s:
        model = s.model(net())
        s.optimizer(sgd(model))
        loader, steps = s.loader(TensorDataset(*points()), shuffle=True), 0
        for _ in s.epochs(EPOCHS):
            for batch in loader:
                inputs, targets = pair_of(batch)
                s.step(F.cross_entropy(model(inputs), targets))
                steps += 1
        return steps, weights_of(model)


@pytest.mark.parametrize("version", sorted(path.name for path in GOLDEN.iterdir()))
@pytest.mark.parametrize("workers", [2, 3])
def test_a_training_goes_on_from_it(version: str, workers: int, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / version, tmp_path / "snapshots")
    for steps, weights in run_ranks(workers, rest, tmp_path):
        assert steps == 4
        assert_weights(weights, plain_loop())
