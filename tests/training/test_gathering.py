"""Losses that compare a batch's samples with each other: the same on any number of workers."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.distributed.group import Group
from paceline.errors import JobError, UsageError
from paceline.options.fields import OptionValue
from paceline.training.session import Session
from tests.support.ranks import RankError, run_ranks
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


def contrast(scores: Tensor, targets: Tensor) -> Tensor:
    """Take the farthest of each sample's kind, and the nearest other one, within what is given."""
    apart, alike = torch.cdist(scores, scores), targets[:, None] == targets
    nearest = apart.masked_fill(alike, 9.0).min(1).values
    return F.relu((apart * alike).max(1).values - nearest + 0.5).mean()


def whole(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    scores = model(inputs)
    return contrast(scores, targets) + F.cross_entropy(scores, targets)


def loop(group: Group, directory: Path) -> list[Tensor]:
    with session_on(group, directory / str(group.world_size)) as s:
        model = s.model(net())
        s.optimizer(sgd(model))
        batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
        for _ in s.epochs(EPOCHS):
            for batch in batches:
                inputs, targets = pair_of(batch)
                scores = model(inputs)
                loss = contrast(s.gather(scores), s.gather(targets))
                s.step(loss + F.cross_entropy(scores, targets))
        return weights_of(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_loss_over_all_workers_samples_is_that_of_one_process(
    world_size: int, tmp_path: Path
) -> None:
    """Also where the last batch has two samples, and the third worker none."""
    expected = plain_loop(loss=whole)
    for found in run_ranks(world_size, lambda group: loop(group, tmp_path)):
        assert_weights(found, expected, 1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shards": 2}, r"s\.gather\(...\) can't be combined with --shards"),
        ({"max_batch_per_worker": 3}, "can't be combined with --max-batch-per-worker"),
        ({}, "about a batch to evaluate on"),
    ],
)
def test_where_the_samples_are_not_there_at_once_it_is_refused(
    settings: dict[str, OptionValue], message: str, tmp_path: Path
) -> None:
    def misuse(s: Session) -> None:
        model = s.model(net())
        s.optimizer(sgd(model))
        data = TensorDataset(*points())
        batches, test = s.loader(data, global_batch=BATCH), s.eval_loader(data)
        for _ in s.epochs(1):
            for batch in batches if settings else test:
                s.gather(pair_of(batch)[1])

    def body(group: Group) -> None:
        with (
            pytest.raises(UsageError, match=message),
            session_on(group, tmp_path, settings) as s,
        ):
            misuse(s)

    run_ranks(1, body)


@pytest.mark.parametrize("unlike", ["shapes", "types"])
def test_rows_that_are_unlike_are_refused_on_all_workers(unlike: str, tmp_path: Path) -> None:
    def body(group: Group) -> None:
        differs = bool(group.rank)
        with session_on(group, tmp_path) as s:
            s.model(net())
            kind = torch.float64 if unlike == "types" and differs else torch.float32
            rows = torch.ones(2, 3 + (unlike == "shapes" and differs), dtype=kind)
            with pytest.raises(JobError, match="unlike shapes or types"):
                s.gather(rows)

    run_ranks(2, body)


def test_a_weight_of_what_is_gathered_is_refused(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(1):
                for inputs, _ in map(pair_of, batches):
                    s.step(s.gather(model(inputs)).mean(), weight=3)

    with pytest.raises(RankError, match=r"can't be combined with s\.gather"):
        run_ranks(1, body)
