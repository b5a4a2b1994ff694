"""Compressed gradients in whole trainings: a resume changes no bit, other workers can go on."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.checkpoint.format import read_snapshot
from paceline.distributed.group import Group
from paceline.errors import InterruptedTraining
from paceline.options.fields import OptionValue
from paceline.training.job import Job
from paceline.training.status_exchange import StopFlag
from tests.support.ranks import run_ranks
from tests.support.sessions import pair_of, session_on, weights_of
from tests.support.tiers import slow
from tests.support.trainings import (
    SIDE,
    StopAt,
    configure,
    pictures,
    plain_job,
    run_training_on,
)
from tests.training.test_resume import assert_same_training, positions, train_in_legs

pytestmark = pytest.mark.ranks
# 50 samples in batches of 8: 7 steps an epoch, the last with 2 samples.
POWERSGD: dict[str, OptionValue] = {
    "sync": "powersgd",
    "powersgd_rank": 2,
    "sync_warmup_steps": 3,
    "optimizer": "sgd",
    "momentum": 0.9,
}


def wide_job() -> Job:
    """A job with matrices that are worth compressing, and with state of its own."""
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(12 * SIDE * SIDE, 20),
        nn.Tanh(),
        nn.Linear(20, 3),
    )
    return Job(model=model, train=pictures(50), validation=pictures(13, seed=2))


@pytest.mark.parametrize(
    ("world_size", "settings", "stops"),
    [
        (2, POWERSGD, [(1, 2), (0, 3), (0, 5)]),  # in the warm-up, after it, in the next epoch
        (3, POWERSGD | {"max_batch_per_worker": 2}, [(1, 7)]),
        slow(2, POWERSGD | {"precision": "fp16", "sync_warmup_steps": 0}, [(1, 5)]),
        slow(2, POWERSGD | {"precision": "bf16"}, [(0, 9)]),
        (2, {"sync_precision": "bf16", "precision": "fp16"}, [(1, 5)]),
    ],
    ids=["powersgd", "pieces", "powersgd-fp16", "powersgd-bf16", "bf16"],
)
@pytest.mark.slow
def test_resumes_inside_an_epoch_change_no_bit(
    world_size: int,
    settings: dict[str, OptionValue],
    stops: list[tuple[int, int]],
    tmp_path: Path,
) -> None:
    config = configure(epochs=2, **settings)
    whole = run_ranks(world_size, run_training_on, tmp_path / "whole", wide_job, config, None)
    asked = [StopAt(rank=rank, forward=forward) for rank, forward in stops]
    legs = train_in_legs(world_size, tmp_path / "legs", wide_job, asked, epochs=2, **settings)
    assert len(set(positions(legs))) == len(stops)
    assert_same_training(legs, whole)
    assert all(map(torch.equal, whole[0].parameters, whole[1].parameters))


@pytest.mark.slow
def test_what_isnt_worth_compressing_is_averaged_in_full(tmp_path: Path) -> None:
    plain = run_ranks(2, run_training_on, tmp_path / "plain", plain_job, configure(), None)
    settings = POWERSGD | {"powersgd_rank": 100}
    del settings["optimizer"], settings["momentum"]
    other = run_ranks(
        2, run_training_on, tmp_path / "other", plain_job, configure(**settings), None
    )
    for got, wanted in zip(other[0].parameters, plain[0].parameters, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


def two_models(
    group: Group, directory: Path, settings: Mapping[str, OptionValue], stop_after: int
) -> tuple[list[Tensor], list[str]]:
    """Train two models at once; a signal comes in one of the steps.

    Returns:
        The weights, and what the user was told of the snapshot.
    """
    flag = StopFlag(under_launcher=True)
    told: list[str] = []
    torch.manual_seed(0)
    first, second = nn.Linear(30, 40), nn.Linear(40, 30)
    rows = torch.randn(40, 30, generator=torch.Generator().manual_seed(3))
    data, usual = TensorDataset(rows, rows), {"global_batch": 4, "snapshot_every_steps": 5}
    with (
        suppress(InterruptedTraining),
        session_on(group, directory, {**usual, **settings}, flag) as s,
    ):
        s.engine.snapshots._report = told.append  # type: ignore[assignment]  # this is a forked process
        s.model(first, name="first")
        s.model(second, name="second")
        s.optimizer(torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.5))
        batches = s.loader(data)
        for _ in s.epochs(1):
            for batch in batches:
                if s.engine.context.progress.state.step == stop_after:
                    flag.name = "SIGTERM"
                inputs, _ = pair_of(batch)
                s.step(F.mse_loss(second(first(inputs).tanh()), inputs))
    return weights_of(first, second), told


TWO: dict[str, OptionValue] = {"sync": "powersgd", "powersgd_rank": 2, "sync_warmup_steps": 3}


def errors_of(directory: Path) -> dict[str, Tensor]:
    """Give what the newest snapshot has of errors: (workers, N, M) each."""
    path = max((directory / "snapshots").glob("step-*"))
    tensors = read_snapshot(path).tensors.get("sync", {})
    return {n: t for n, t in tensors.items() if n.startswith("error/")}


@pytest.mark.slow
def test_errors_of_two_models_are_kept_by_name(tmp_path: Path) -> None:
    whole = run_ranks(2, two_models, tmp_path / "whole", TWO, 99)
    run_ranks(2, two_models, tmp_path / "legs", TWO, 6)
    errors = errors_of(tmp_path / "legs")
    assert errors.keys() == {"error/first/weight", "error/second/weight"}
    assert all(not torch.equal(*rows) for rows in errors.values())
    for weights, told in run_ranks(2, two_models, tmp_path / "legs", TWO, 99):
        assert all(map(torch.equal, weights, whole[0][0]))
        assert told == []


@pytest.mark.parametrize("worlds", [(3, 2), (2, 1), (1, 2)])
@pytest.mark.slow
def test_another_number_of_workers_shares_the_errors_out(
    worlds: tuple[int, int], tmp_path: Path
) -> None:
    before, after = worlds
    run_ranks(before, two_models, tmp_path, TWO, 5)
    errors = errors_of(tmp_path)
    assert bool(errors) == (before > 1)
    found = run_ranks(after, two_models, tmp_path, TWO, 5)
    for weights, told in found:
        assert all(map(torch.equal, weights, found[0][0]))
        assert any("shared out equally" in line for line in told) == (before > 1)
    if after > 1:
        kept = errors_of(tmp_path)
        assert all(len(rows) == after for rows in kept.values())


@pytest.mark.slow
def test_the_mean_of_errors_goes_to_everyone(tmp_path: Path) -> None:
    run_ranks(3, two_models, tmp_path, TWO, 5)
    mean = {name: rows.mean(0) for name, rows in errors_of(tmp_path).items()}

    def body(group: Group) -> None:
        with session_on(group, tmp_path, {**TWO, "global_batch": 4}) as s:
            models = [s.model(nn.Linear(30, 40), name="first")]
            models.append(s.model(nn.Linear(40, 30), name="second"))
            parameters = [p for model in models for p in model.parameters()]
            s.optimizer(torch.optim.SGD(parameters, lr=0.5))
            s.loader(TensorDataset(torch.zeros(40, 30)))
            s.begin()
            for name, rows in s.engine.sync.state_dict().tensors.items():
                if name.startswith("error/") and group.rank == 0:
                    assert torch.equal(rows, mean[name].expand_as(rows))

    run_ranks(2, body)


@pytest.mark.slow
def test_another_method_begins_afresh_and_that_is_said(tmp_path: Path) -> None:
    run_ranks(2, two_models, tmp_path, TWO, 5)
    half: dict[str, OptionValue] = {"sync_precision": "bf16"}
    for _, told in run_ranks(2, two_models, tmp_path, half, 7):
        assert told == [
            "The snapshot was written with --sync powersgd; from here on it is --sync allreduce, "
            "which begins afresh"
        ]
    run_ranks(2, two_models, tmp_path, TWO, 8)
    (again,) = run_ranks(1, two_models, tmp_path, {}, 99)
    assert "with --sync powersgd; from here on it is --sync allreduce" in again[1][-1]
