"""What is judged and saved while each worker has weights of its own, and what is said of it."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import IterableDataset, TensorDataset

from paceline.distributed.group import Group
from paceline.options.fields import OptionValue
from tests.support.ranks import run_ranks
from tests.support.sessions import net, pair_of, points, session_on, weights_of
from tests.training.sync.test_local_sgd import DILOCO, LOCAL, newest

pytestmark = pytest.mark.ranks


def judging(
    group: Group, directory: Path, settings: Mapping[str, OptionValue], at: int, *, leaves: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Evaluate and save after `s.step` of a step: own weights, and those that were judged."""
    with session_on(group, directory, settings) as s:
        model = s.model(net())
        s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        batches = s.loader(TensorDataset(*points()), global_batch=8)
        test = s.eval_loader(TensorDataset(*points(2, seed=2)), batch_size=1)
        judged: list[Tensor] = []

        def judge(_: object) -> dict[str, float]:
            judged[:] = weights_of(model)
            return {"accuracy": 0.5}

        for _ in s.epochs(1):
            for batch in batches:
                inputs, targets = pair_of(batch)
                s.step(F.cross_entropy(model(inputs), targets))
                if s.engine.context.progress.state.step == at:
                    if leaves:
                        break
                    s.evaluate(judge, test)
                    s.snapshot(must=True)
                    s.engine.snapshots.flush()
                    break
            own = weights_of(model)
            if leaves:
                s.evaluate(judge, test)
                s.snapshot(must=True)
                s.engine.snapshots.flush()
            s.barrier()
            names = [name for name, _ in model.named_parameters()]
            if leaves:  # else it is taken once the step is over
                saved = newest(directory).tensors["model"]
                assert all(torch.equal(saved[n], w) for n, w in zip(names, judged, strict=True))
            s.barrier()
        s.engine.snapshots.flush()
        s.barrier()
        final = newest(directory).tensors["model"]
        if leaves:  # the epoch's own snapshot is of what was judged
            assert all(torch.equal(final[n], w) for n, w in zip(names, judged, strict=True))
        return own, judged


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("at", [0, 3, 4])
@pytest.mark.core_cases(3)
def test_what_is_judged_within_a_step_is_what_all_have_made_of_it(
    at: int, leaves: bool, tmp_path: Path
) -> None:
    """In the first step of a round, where all were alike before it, and where they have been alike
    again."""
    settings = {**LOCAL, "sync_warmup_steps": 0, "sync_delay": 0}
    found = run_ranks(2, partial(judging, leaves=leaves), tmp_path, settings, at)
    mean = [torch.stack(rows).mean(0) for rows in zip(*(own for own, _ in found), strict=True)]
    assert not all(map(torch.equal, found[0][0], found[1][0]))
    for _, judged in found:
        assert all(map(torch.equal, judged, found[0][1]))
        for got, right in zip(judged, mean, strict=True):
            torch.testing.assert_close(got, right)


def test_what_follows_each_workers_own_weights_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path, {**DILOCO, "sync_every": 9, "progress": "plain"}) as s:
            model = s.model(net())
            s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            s.keep(torch.optim.swa_utils.AveragedModel(model), name="ema")
            s.loader(TensorDataset(*points()), global_batch=8)
            s.begin()

    run_ranks(2, body)
    said = capfd.readouterr().out
    assert "ema, given to s.keep, holds tensors that follow each worker's own weights" in said
    assert said.count("--sync-every 9 is more than the 7 steps of an epoch") == 1


def test_of_a_stream_nobody_knows_whether_an_epoch_has_as_many_steps(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Points(IterableDataset[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            return zip(*points(), strict=True)

    def body(group: Group) -> int:
        settings = {**LOCAL, "sync_every": 99, "epochs": 1, "progress": "plain"}
        with session_on(group, tmp_path, settings) as s:
            model = s.model(net())
            s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            batches = s.loader(Points(), global_batch=8)
            for _ in s.epochs(1):
                for x, y in map(pair_of, batches):
                    s.step(F.cross_entropy(model(x), y))
            return s.steps_done

    first, second = run_ranks(2, body)
    assert first == second > 0
    assert "--sync-every 99 is more than" not in capfd.readouterr().out
