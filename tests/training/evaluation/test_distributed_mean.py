"""Means over all samples, exactly."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.distributed.group import Group
from paceline.errors import JobError
from tests.support.ranks import run_ranks
from tests.support.sessions import net, pair_of, points, session_on, sgd
from tests.support.trainings import RecordingConsole

pytestmark = pytest.mark.ranks
WORLDS = [1, 2, 3]


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("samples", [1, 2, 13])
@pytest.mark.core_cases(5)
def test_evaluation_counts_each_sample_once(world_size: int, samples: int, tmp_path: Path) -> None:
    def body(group: Group) -> tuple[Mapping[str, float], Mapping[str, float]]:
        with session_on(group, tmp_path) as s:
            model = s.model(nn.BatchNorm1d(1, momentum=1.0))
            model.eval()  # a part that the script has frozen stays so
            rows = torch.arange(float(samples)).unsqueeze(1)
            test = s.eval_loader(TensorDataset(rows), batch_size=3)
            by_sample = s.evaluate(lambda b: {"mean": b[0], "ones": 1.0}, test)  # type: ignore[index]
            by_batch = s.evaluate(lambda b: {"mean": b[0].mean()}, test)  # type: ignore[index]
            assert not model.training
            return by_sample, by_batch

    for by_sample, by_batch in run_ranks(world_size, body):
        assert by_sample == {"mean": (samples - 1) / 2, "ones": 1.0}
        assert by_batch["mean"] == pytest.approx((samples - 1) / 2)


def test_how_far_an_evaluation_is_is_shown(tmp_path: Path) -> None:
    def body(group: Group) -> list[tuple[str, int, int]]:
        with session_on(group, tmp_path, {"epochs": 1}) as s:
            console = s.engine.context.console = RecordingConsole()
            s.optimizer(sgd(s.model(net())))
            batches = s.loader(TensorDataset(*points(8)), global_batch=8)
            model = s.engine.context.components.model
            test = s.eval_loader(TensorDataset(*points(7)), batch_size=3)
            s.evaluate(lambda _: {"loss": 1.0}, test)
            for _ in s.epochs():
                for x, y in map(pair_of, batches):
                    s.step(F.cross_entropy(model(x), y))
                s.evaluate(lambda _: {"loss": 1.0}, test)
            return console.evaluated

    (shown,) = run_ranks(1, body)
    assert shown == [
        (what, done, 3) for what in ("evaluation", "epoch 1/1 validation") for done in range(3)
    ]


def test_job_errors_name_the_figures_that_differ(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            test = s.eval_loader(TensorDataset(*points(4)), batch_size=1)
            names = iter("abcd")
            with pytest.raises(JobError, match="the figures a for one batch and b for another"):
                s.evaluate(lambda _: {next(names): 1.0}, test)

    run_ranks(1, body)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (torch.ones(3), "gave an object of type Tensor; it should give figures by name"),
        (None, r"gave nothing \(None\); it should"),
        ({1: 2.0}, "gave a dictionary whose keys aren't all text; it should"),
        ({"accuracy": "high"}, "the figure 'accuracy' of an evaluation is an object of type str"),
        ({"accuracy": [1.0, 2.0]}, "of type list; give a number or a tensor"),
    ],
)
def test_what_is_no_figures_by_name_is_refused(found: Any, message: str, tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            test = s.eval_loader(TensorDataset(*points(4)), batch_size=2)
            with pytest.raises(JobError, match=message):
                s.evaluate(lambda _: found, test)

    run_ranks(1, body)


def test_workers_whose_figures_have_other_names_are_an_error_of_all(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            test = s.eval_loader(TensorDataset(*points(4)), batch_size=1)
            name = "a" if group.rank == 0 else "b"
            with pytest.raises(JobError, match="the workers' evaluations gave different figures"):
                s.evaluate(lambda _: {name: 1.0}, test)

    run_ranks(2, body)
