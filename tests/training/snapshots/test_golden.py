"""Snapshots that earlier versions have written, byte for byte, still load.

Each was taken on 2 workers after 10 of the 14 steps of `plain_loop`, by a SIGTERM. When a snapshot
gets a new field, one of the version before is added: there,
`python -m tests.training.snapshots.test_golden NAME` writes golden/NAME. The name says how its
snapshots differ from later ones.
"""

import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.distributed.group import Group
from paceline.errors import InterruptedTraining
from paceline.training.status_exchange import StopFlag
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
STEPS, LEFT = 14, 4


def rest(group: Group, directory: Path, most: int = STEPS) -> tuple[int, list[Tensor]]:
    """Begin or resume, and train to the end or until a signal after `most` steps.

    Returns:
        How many steps were done, and the weights.
    """
    flag = StopFlag(under_launcher=True)
    with session_on(group, directory, {"epochs": EPOCHS, "global_batch": BATCH}, flag) as s:
        model = s.model(net())
        s.optimizer(sgd(model))
        loader, steps = s.loader(TensorDataset(*points()), shuffle=True), 0
        for _ in s.epochs(EPOCHS):
            for batch in loader:
                inputs, targets = pair_of(batch)
                s.step(F.cross_entropy(model(inputs), targets))
                steps += 1
                flag.name = "SIGTERM" if steps == most else None
        return steps, weights_of(model)


@pytest.mark.parametrize("version", sorted(path.name for path in GOLDEN.iterdir()))
@pytest.mark.parametrize("workers", [2, 3])
def test_a_training_goes_on_from_it(version: str, workers: int, tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / version, tmp_path / "snapshots")
    for steps, weights in run_ranks(workers, rest, tmp_path):
        assert steps == LEFT
        assert_weights(weights, plain_loop())


def begin(group: Group, directory: Path) -> None:
    with suppress(InterruptedTraining):
        rest(group, directory, STEPS - LEFT)


def write(golden: Path) -> None:
    """Write a snapshot of this version below a new directory."""
    with tempfile.TemporaryDirectory() as directory:
        run_ranks(2, begin, Path(directory))
        taken = f"step-{STEPS - LEFT:012}"
        shutil.copytree(Path(directory) / "snapshots" / taken, golden / taken)


def test_one_of_today_is_written_like_them(tmp_path: Path) -> None:
    write(tmp_path / "snapshots")
    names = {path.relative_to(GOLDEN / "first") for path in (GOLDEN / "first").rglob("*")}
    written = tmp_path / "snapshots"
    assert {path.relative_to(written) for path in written.rglob("*")} == names
    for steps, weights in run_ranks(2, rest, tmp_path):
        assert steps == LEFT
        assert_weights(weights, plain_loop())


if __name__ == "__main__":
    write(GOLDEN / sys.argv[1])
