"""Values of a script's own in the snapshots: alike everywhere, or of each worker."""

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from paceline.distributed.group import Group
from paceline.errors import InterruptedTraining, SnapshotError, UsageError
from paceline.options.fields import OptionValue
from paceline.training.rng import seed_everything
from paceline.training.snapshots.script_state import same_values
from paceline.training.status_exchange import StopFlag
from tests.support.ranks import run_ranks
from tests.support.sessions import assert_weights, points, session_on, weights_of

pytestmark = pytest.mark.ranks
STREAMS, LENGTH, EPOCHS = 4, 6, 2
"""A batch is one element of each of 4 streams, which are 6 long."""


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNNCell(5, 3)

    def forward(self, x: Tensor, hidden: Tensor | None) -> Tensor:
        found: Tensor = self.cell(x, hidden)
        return found


def streams() -> Tensor:
    """(LENGTH * STREAMS, 5): in their own order a batch is the next element of each stream."""
    return points(STREAMS * LENGTH)[0]


def plain() -> list[Tensor]:
    """What one process without Paceline does: the hidden state goes on from batch to batch."""
    seed_everything(0)
    model = Cell()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(EPOCHS):
        hidden: Tensor | None = None
        for x in streams().split(STREAMS):
            optimizer.zero_grad()
            out = model(x, hidden)
            out.square().mean().backward()
            optimizer.step()
            hidden = out.detach()
    return weights_of(model)


def train(
    group: Group,
    directory: Path,
    settings: Mapping[str, OptionValue],
    stop_at: int | None = None,
    per_worker: bool = True,
) -> list[Tensor]:
    flag = StopFlag(under_launcher=True)
    with session_on(group, directory, settings, flag) as s:
        model = s.model(Cell())
        s.optimizer(torch.optim.SGD(model.parameters(), 0.5))
        kept = s.keep(hidden=None, per_worker=per_worker)
        batches = s.loader(TensorDataset(streams()), global_batch=STREAMS, shuffle=False)
        try:
            for _ in s.epochs(EPOCHS):
                kept.hidden = None
                for batch in batches:
                    assert isinstance(batch, list)
                    if s.steps_done == stop_at:
                        flag.name = "SIGTERM"
                    out = model(batch[0], kept.hidden)
                    s.step(out.square().mean())
                    kept.hidden = out.detach()
        except InterruptedTraining:
            return []
        return weights_of(model)


@pytest.mark.parametrize("settings", [{}, {"shards": 4}, {"shards": 2}])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.core_cases(2)
def test_each_worker_or_shard_has_a_hidden_state_of_its_own(
    world_size: int, settings: Mapping[str, OptionValue], tmp_path: Path
) -> None:
    for found in run_ranks(world_size, train, tmp_path, settings):
        assert_weights(found, plain())


@pytest.mark.parametrize(
    ("settings", "worlds"), [({}, (2, 2)), ({"shards": 4}, (2, 1)), ({"shards": 4}, (1, 3))]
)
@pytest.mark.slow
def test_it_goes_on_where_it_was(
    settings: Mapping[str, OptionValue], worlds: tuple[int, int], tmp_path: Path
) -> None:
    whole = run_ranks(worlds[0], train, tmp_path / "whole", settings)[0]
    stopped = run_ranks(worlds[0], train, tmp_path / "legs", settings, 8)
    assert stopped == [[]] * worlds[0]
    for found in run_ranks(worlds[1], train, tmp_path / "legs", settings):
        assert all(map(torch.equal, found, whole))
        assert_weights(found, plain())


def test_on_another_number_of_workers_it_is_refused(tmp_path: Path) -> None:
    run_ranks(2, train, tmp_path, {}, 8)

    def told(group: Group) -> None:
        message = r"hidden.*the snapshot has those of 2, while there are 1 now\. Resume with 2"
        with pytest.raises(SnapshotError, match=message):
            train(group, tmp_path, {})

    run_ranks(1, told)


def test_plain_values_come_back(tmp_path: Path) -> None:
    def body(group: Group, stop_at: int | None) -> dict[str, object]:
        flag = StopFlag(under_launcher=True)
        with session_on(group, tmp_path, None, flag) as s:
            model = s.model(Cell())
            s.optimizer(torch.optim.SGD(model.parameters(), 0.5))
            kept = s.keep(best_acc1=0.0, names=["a"], seen=0, in_epoch=-1)
            batches = s.loader(TensorDataset(streams()), global_batch=STREAMS)
            try:
                for _ in s.epochs(EPOCHS):
                    kept.in_epoch = 0
                    for batch in batches:
                        assert isinstance(batch, list)
                        s.step(model(batch[0], None).square().mean())
                        kept.seen += 1
                        kept.in_epoch += 1
                        if s.steps_done == stop_at:
                            kept.best_acc1, kept.names = 71.5, [*kept.names, "b"]
                            flag.name = "SIGTERM"
            except InterruptedTraining:
                return {}
            return dict(kept.state_dict())

    run_ranks(2, body, 8)  # within the second epoch
    for found in run_ranks(1, body, None):
        assert found.pop("in_epoch") == LENGTH
        assert found == {"best_acc1": 71.5, "names": ["a", "b"], "seen": EPOCHS * LENGTH}


def test_misuse_is_told(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            kept = s.keep(best=0.0)
            with pytest.raises(UsageError, match="'best' is in the snapshots already"):
                s.keep(best=1.0)
            with pytest.raises(UsageError, match="takes an object"):
                s.keep()
            with pytest.raises(UsageError, match="one object and its name"):
                s.keep(kept)  # type: ignore[call-overload]
            with pytest.raises(AttributeError, match="nothing is kept as 'worst'"):
                _ = kept.worst

    run_ranks(1, body)


def test_values_are_compared_with_nan_as_itself() -> None:
    some, nan = torch.tensor([1.0, float("nan")]), float("nan")
    assert same_values(some, some.clone())
    assert not same_values(some, torch.tensor([nan, 1.0]))
    assert not same_values(some, torch.tensor([2.0, nan]))
    assert not same_values(some, some.double())
    assert not same_values(some, some[:1])
    assert same_values(torch.tensor([True]), torch.tensor([True]))
