"""`profile.json` of real trainings: what is slow shows where it is slow."""

import time
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.distributed.group import Group
from paceline.gradient_sync import low_rank, powersgd
from paceline.options.fields import OptionValue
from paceline.results.metrics_table import read_table
from paceline.results.profile import StepProfile
from paceline.training import status_exchange
from tests.support.ranks import run_ranks
from tests.support.sessions import pair_of, session_on

pytestmark = pytest.mark.ranks

_SLOW_S = 0.02
_BYTES = 4 * (4 * 3 + 3)


class Slow(nn.Module):
    """Takes its time."""

    def __init__(self, delay_s: float) -> None:
        super().__init__()
        self.delay_s = delay_s

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(self.delay_s)
        return inputs


class SlowData(TensorDataset):
    """Takes its time for each sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        time.sleep(_SLOW_S / 4)
        return tuple(tensor[index] for tensor in self.tensors)


def _train(
    group: Group,
    directory: Path,
    settings: dict[str, OptionValue],
    slow: str = "",
    steps: int = 8,
    epochs: int = 2,
    exchange_every_s: float = 0.0,
) -> None:
    """Train on 8 samples a step."""
    generator = torch.Generator().manual_seed(1)
    tensors = torch.randn(8 * steps, 4, generator=generator), torch.zeros(8 * steps).long()
    data = SlowData(*tensors) if slow == "data" else TensorDataset(*tensors)
    delay_s = _SLOW_S if slow == "worker" and group.rank == 1 else 0.0
    with session_on(group, directory, settings) as s:
        status_exchange._EVERY_S = exchange_every_s  # a forked process
        model = s.model(nn.Sequential(nn.Linear(4, 3), Slow(delay_s)))
        s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        batches = s.loader(data, global_batch=8)
        judged = s.eval_loader(TensorDataset(*tensors))
        for _ in s.epochs(epochs):
            for batch in batches:
                inputs, targets = pair_of(batch)
                s.step(F.cross_entropy(model(inputs), targets))
            s.evaluate(lambda batch: {"loss": model(pair_of(batch)[0]).mean()}, judged)
        s.engine.context.profiler.record(s.engine.context.progress, must=True)


def _profile(
    workers: int,
    directory: Path,
    settings: dict[str, OptionValue] | None = None,
    slow: str = "",
    steps: int = 8,
) -> StepProfile:
    run_ranks(workers, _train, directory, settings or {}, slow, steps)
    profile = StepProfile.read(directory / "profile.json")
    assert all(part >= 0 for part in astuple(profile.parts))
    assert sum(astuple(profile.parts)) == pytest.approx(profile.step_s.median)
    assert profile.images_per_s == pytest.approx(8 / profile.step_s.median)
    assert [w.rank for w in profile.workers] == list(range(workers))
    assert (profile.gradient_bytes, profile.parameter_bytes) == (_BYTES, _BYTES)
    assert sum(a.bytes for a in profile.gradients) == _BYTES
    assert (profile.world_size, profile.global_batch) == (workers, 8)
    assert profile.steps_per_epoch == steps
    return profile


@pytest.mark.parametrize("settings", [{}, {"shards": 2}, {"sync_precision": "bf16"}])
@pytest.mark.core_cases(2)
def test_a_slow_worker_is_waited_for_and_costs_no_communication(
    tmp_path: Path, settings: dict[str, OptionValue]
) -> None:
    profile = _profile(2, tmp_path, settings, "worker")
    parts, (fast, slow) = profile.parts, profile.workers
    assert parts.waiting > 0.25 * _SLOW_S  # half of the workers, all the time
    assert parts.exposed < parts.waiting
    assert slow.compute_s > fast.compute_s + 0.5 * _SLOW_S
    assert parts.forward > 0.25 * _SLOW_S
    assert profile.wire_bytes_per_step >= _BYTES / (2 if "sync_precision" in settings else 1)


@pytest.mark.parametrize("workers", [1, 2])
def test_slow_data_is_data(tmp_path: Path, workers: int) -> None:
    profile = _profile(workers, tmp_path, {}, "data")
    assert profile.parts.data == max(astuple(profile.parts))
    assert profile.epoch.loader_start_s is not None
    assert profile.epoch.loader_start_s > 0.5 * _SLOW_S


@pytest.mark.parametrize("settings", [{}, {"shards": 2}, {"max_batch_per_worker": 3}])
def test_a_worker_alone_has_no_communication(
    tmp_path: Path, settings: dict[str, OptionValue]
) -> None:
    profile = _profile(1, tmp_path, settings)
    assert (profile.parts.exposed, profile.parts.waiting) == (0.0, 0.0)
    assert profile.wire_bytes_per_step == 0.0
    assert profile.sync == ("ordered" if "shards" in settings else "allreduce")
    rows = read_table(tmp_path / "metrics.csv")
    assert [row["exposed_comm"] for row in rows] == ["0", "0"]


@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.core_cases(2)
def test_a_training_of_a_few_steps_has_a_profile(tmp_path: Path, workers: int, steps: int) -> None:
    profile = _profile(workers, tmp_path, {}, "", steps)
    assert profile.steps_seen > 0
    assert profile.parts.backward > 0
    assert profile.parts.optimizer > 0


def _with_rare_exchanges(group: Group, directory: Path, steps: int) -> None:
    _train(group, directory, {}, "", steps, 12, 1e6)  # as if epochs were over in no time


@pytest.mark.parametrize(("steps", "least"), [(2, 5), (3, 7), (8, 8)])
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.core_cases(2)
def test_steps_of_short_epochs_are_looked_at(
    tmp_path: Path, workers: int, steps: int, least: int
) -> None:
    """An epoch that is shorter than the time between two exchanges has its look as well."""
    run_ranks(workers, _with_rare_exchanges, tmp_path, steps)
    assert StepProfile.read(tmp_path / "profile.json").steps_seen >= least


def test_epochs_have_their_costs_and_rows_their_shares(tmp_path: Path) -> None:
    costs = _profile(2, tmp_path).epoch
    happened = (costs.evaluation_s, costs.snapshot_s, costs.loader_start_s)
    assert all(cost is not None and cost > 0 for cost in happened)
    for row in read_table(tmp_path / "metrics.csv"):
        shares = float(row["exposed_comm"]), float(row["waiting"])
        assert all(0 <= share <= 1 for share in shares)
        assert float(row["wire_bytes_per_step"]) == _BYTES  # a ring of two


def _with_slow_approximations(group: Group, directory: Path) -> None:
    orthonormal = low_rank._orthonormal

    def slow_orthonormal(matrix: Tensor) -> Tensor:
        time.sleep(_SLOW_S)
        return orthonormal(matrix)

    low_rank._orthonormal = slow_orthonormal
    powersgd._MIN_GAIN = 0
    _train(group, directory, {"sync": "powersgd", "powersgd_rank": 1, "sync_warmup_steps": 0})


def test_what_powersgd_computes_is_no_communication(tmp_path: Path) -> None:
    run_ranks(2, _with_slow_approximations, tmp_path)
    parts = StepProfile.read(tmp_path / "profile.json").parts
    # What leaves during the backward pass may be computed there.
    computing_s = parts.backward + parts.other
    assert computing_s > _SLOW_S
    assert parts.exposed < computing_s / 2
    exposed = [float(row["exposed_comm"]) for row in read_table(tmp_path / "metrics.csv")]
    assert max(exposed) < 0.5


def test_a_profile_knows_nothing_of_the_warm_up(tmp_path: Path) -> None:
    """The warm-up is the first epoch; only the second one's steps count."""

    def body(group: Group) -> None:
        with session_on(group, tmp_path, {"sync": "powersgd"}) as s:
            model = s.model(nn.Sequential(nn.Linear(4, 3)))
            s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            data = TensorDataset(torch.randn(64, 4), torch.zeros(64).long())
            batches, profiler = s.loader(data, global_batch=8), s.engine.context.profiler
            for epoch in s.epochs(2):
                for batch in batches:
                    inputs, targets = pair_of(batch)
                    s.step(F.cross_entropy(model(inputs), targets))
                    if epoch == 0:
                        seen = profiler.step_profiler.samples()
                assert max(seen) < 8  # they stand until there are others
            assert min(profiler.step_profiler.samples()) > 8
            assert all(lap.until > 9 for lap in profiler.step_profiler.laps())
            total = profiler.total()
            assert total is not None
            assert total.wire_bytes > 0
            assert profiler.sync == "powersgd"

    run_ranks(2, body)
