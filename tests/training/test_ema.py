"""The moving average of the weights: as PyTorch keeps it, on any number of workers."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from paceline.checkpoint.format import read_snapshot
from paceline.data.order import epoch_order
from paceline.distributed.group import Group
from paceline.errors import InterruptedTraining, SnapshotError, UsageError
from paceline.options.fields import OptionValue
from paceline.training.rng import seed_everything
from paceline.training.snapshots.model_weights import evaluated_weights
from paceline.training.status_exchange import StopFlag
from paceline.training.weight_average import WeightAverage
from tests.support.ranks import RankError, run_ranks
from tests.support.sessions import EPOCHS, SAMPLES, pair_of, points, session_on, sgd

pytestmark = pytest.mark.ranks
BATCH, DECAY = 10, 0.8  # no short batch: BatchNorm refuses a shard of one sample


class Tied(nn.Module):
    """A parameter under two names, a BatchNorm, and one that isn't trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)
        self.last = nn.Linear(5, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = torch.tanh(self.second(self.norm(self.first(inputs)))) * self.frozen
        outputs: Tensor = self.last(hidden)
        return outputs


def plain() -> tuple[list[float], Mapping[str, Tensor], Mapping[str, Tensor]]:
    """A loop without Paceline: the average's loss after each epoch, both models' weights."""
    seed_everything(0)
    model = Tied()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer, losses = sgd(model), []
    inputs, targets = points()
    for epoch in range(EPOCHS):
        for picked in torch.from_numpy(epoch_order(SAMPLES, 0, epoch)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[picked]), targets[picked]).backward()
            optimizer.step()
            average.update_parameters(model)
        average.eval()
        with torch.no_grad():
            losses.append(F.cross_entropy(average(inputs), targets).item())
    return losses, average.module.state_dict(), model.state_dict()


def train(
    group: Group,
    directory: Path,
    settings: Mapping[str, OptionValue] | None = None,
    most: int = 0,
    decay: float | None = DECAY,
) -> tuple[list[float], dict[str, Tensor], str]:
    """Train, or go on, to the end or until a signal after `most` steps.

    Returns:
        The loss after each epoch, the model's weights behind it, and the hash of all states.
    """
    flag, steps, losses = StopFlag(under_launcher=True), 0, []
    with session_on(group, directory, settings, flag) as s:
        model = s.model(Tied())
        s.optimizer(sgd(model))
        if decay is not None:
            s.ema(decay)
        loader = s.loader(TensorDataset(*points()), global_batch=BATCH)
        held_out = s.eval_loader(TensorDataset(*points()))
        with suppress(InterruptedTraining):
            for _ in s.epochs(EPOCHS):
                for batch in loader:
                    inputs, targets = pair_of(batch)
                    if s.step(F.cross_entropy(model(inputs), targets)):
                        steps += 1
                    flag.name = "SIGTERM" if steps == most else None

                def judge(batch: object) -> dict[str, Tensor]:
                    inputs, targets = pair_of(batch)
                    return {"loss": F.cross_entropy(model(inputs), targets)}

                losses.append(s.evaluate(judge, held_out)["loss"])
        s.engine.snapshots.flush()
        return losses, model.state_dict(), s.engine.snapshots.state_fingerprint()


def newest(directory: Path) -> Mapping[str, Mapping[str, Tensor]]:
    return read_snapshot(max((directory / "snapshots").glob("step-*"))).tensors


def same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], atol: float = 0.0) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol)


def test_it_is_pytorchs_own_average_evaluated_and_saved(tmp_path: Path) -> None:
    (found,) = run_ranks(1, train, tmp_path)
    losses, average, trained = plain()
    assert found[0] == pytest.approx(losses, abs=1e-6)
    same(found[1], trained, atol=1e-6)  # training itself goes on with its own weights
    saved = newest(tmp_path)
    same(saved["model"], trained, atol=1e-6)
    same(evaluated_weights(saved), average, atol=1e-6)
    assert not torch.equal(saved["ema"]["last.weight"], saved["model"]["last.weight"])


@pytest.mark.slow
def test_with_shards_it_has_the_same_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    shards: dict[str, OptionValue] = {"shards": 3}
    alone, *_ = run_ranks(1, train, tmp_path / "1", shards)
    expected = newest(tmp_path / "1")["ema"]
    for workers in (2, 3):
        directory = tmp_path / str(workers)
        for found in run_ranks(workers, train, directory, shards):
            assert (found[0], found[2]) == (alone[0], alone[2])
        same(newest(directory)["ema"], expected)
    # Stopped within an epoch on two workers, and gone on with on three.
    run_ranks(2, train, tmp_path / "legs", shards, 7)
    found, *_ = run_ranks(3, train, tmp_path / "legs", shards)
    assert (found[0][-1], found[2]) == (alone[0][-1], alone[2])
    same(newest(tmp_path / "legs")["ema"], expected)


def test_a_training_that_had_none_begins_one_where_it_goes_on(tmp_path: Path) -> None:
    run_ranks(1, train, tmp_path, None, 7, None)
    assert "ema" not in newest(tmp_path)
    run_ranks(1, train, tmp_path, {"ema": DECAY}, 0, None)
    assert set(newest(tmp_path)["ema"]) == {
        n for n, _ in Tied().named_parameters(remove_duplicate=False)
    }


def test_an_average_of_another_model_is_refused(tmp_path: Path) -> None:

    average = WeightAverage(nn.Linear(2, 1), DECAY)
    assert average.tensors() == {}
    with pytest.raises(SnapshotError, match="isn't of this model"):
        average.restore({"weight": torch.zeros(1, 3), "bias": torch.zeros(1)})


@pytest.mark.parametrize(
    ("settings", "decay", "message"),
    [
        ({}, 1.0, "a decay above 0 and below 1"),
        ({"ema": 0.9}, 0.99, "the script has ema=0.99"),
    ],
)
def test_what_it_cannot_be(
    settings: dict[str, OptionValue], decay: float, message: str, tmp_path: Path
) -> None:
    with pytest.raises((RankError, UsageError), match=message):
        run_ranks(1, train, tmp_path, settings, 0, decay)
