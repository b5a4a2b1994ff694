"""What a session refuses because it would hang, or give wrong weights without a word."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from paceline.data.options import DataOptions
from paceline.distributed.group import Group
from paceline.distributed.work_division import Division
from paceline.errors import InterruptedTraining, UsageError
from paceline.options.fields import OptionValue
from paceline.training import status_exchange
from paceline.training.batches.plan import check_plan, make_plan
from paceline.training.status_exchange import StopFlag
from tests.support.ranks import run_ranks
from tests.support.sessions import BATCH, net, pair_of, points, session_on, sgd


@pytest.mark.parametrize(
    ("options", "samples", "sync", "optimizers", "message"),
    [
        (DataOptions(global_batch=8, max_batch_per_worker=2), 80, False, 2, "several optimizers"),
        (DataOptions(global_batch=8), None, True, 1, "on a stream needs --drop-last"),
        (DataOptions(global_batch=8), 81, True, 1, "the last batch of an epoch has 1 samples"),
    ],
)
def test_plans_that_leave_a_worker_waiting_are_refused(
    options: DataOptions, samples: int | None, sync: bool, optimizers: int, message: str
) -> None:
    plan = make_plan(options, Division.of(None, 2), samples)
    with pytest.raises(UsageError, match=message):
        check_plan(plan, sync_batchnorm=sync, optimizers=optimizers)
    check_plan(plan, sync_batchnorm=False, optimizers=1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, r"2 samples for 3 workers.*nn\.SyncBatchNorm\) each needs one"),
        ({"max_batch_per_worker": 2}, "can't be combined with --max-batch-per-worker"),
        ({"shards": 3}, "--shards can't be combined with nn.SyncBatchNorm"),
    ],
)
@pytest.mark.ranks
def test_a_models_own_synchronised_batchnorm_is_guarded_alike(
    tmp_path: Path, settings: dict[str, OptionValue], message: str
) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path, settings) as s:
            # It refuses CPUs in its forward pass; a worker without samples wouldn't enter it.
            model = s.model(
                nn.SyncBatchNorm.convert_sync_batchnorm(
                    nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4))
                )
            )
            s.optimizer(sgd(model))
            inputs, labels = points()
            s.loader(TensorDataset(inputs[:14], labels[:14]), global_batch=12)
            with pytest.raises(UsageError, match=message):
                next(s.epochs(1))

    run_ranks(3, body)


class Counted(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.full((5,), float(number)) for number in range(100_000))


@pytest.mark.slow
def test_a_time_budget_in_mid_stream_doesnt_count_as_an_epoch(tmp_path: Path) -> None:
    def body(group: Group) -> tuple[int, int, str | None]:
        with session_on(group, tmp_path, {"time_budget": "2s"}) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            stream = s.loader(Counted(), global_batch=BATCH)
            for _ in s.epochs(2):
                for batch in stream:
                    assert isinstance(batch, Tensor)
                    s.step(model(batch).square().mean() * 1e-9)
            s.engine.close_epoch()
            state = s.engine.context.progress.state
            return state.epoch, state.step_in_epoch, state.ended

    [(epoch, steps, ended)] = run_ranks(1, body)
    assert (epoch, ended) == (0, "time")
    assert 0 < steps < 100_000 // BATCH


@pytest.mark.ranks
def test_training_on_an_evaluation_loader_is_refused(tmp_path: Path) -> None:
    def body(group: Group) -> str:
        with session_on(group, tmp_path) as s:
            data = DataLoader(TensorDataset(*points()), batch_size=BATCH)
            own = net()
            model, _, nothing, loader = s.prepare(own, sgd(own), None, data)
            assert nothing is None
            assert isinstance(model, nn.Module)
            s.begin()
            for batch in loader:
                inputs, targets = pair_of(batch)
                loss = F.cross_entropy(model(inputs), targets)
                with pytest.raises(UsageError, match=r"s\.loader\(data, shuffle=False\)") as caught:
                    s.step(loss)
                return str(caught.value)
        return "no batch"

    assert len(set(run_ranks(2, body))) == 1


@pytest.mark.ranks
def test_losses_of_separate_halves_of_a_step_are_counted(tmp_path: Path) -> None:
    def body(group: Group) -> float | None:
        with session_on(group, tmp_path) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(1):
                for batch in batches:
                    inputs, targets = pair_of(batch)
                    s.backward(F.cross_entropy(model(inputs), targets))
                    s.update()
            return s.engine.context.progress.state.train_loss

    losses = run_ranks(2, body)
    assert losses[0] == losses[1]
    assert losses[0] is not None
    assert 0 < losses[0] < 2


@pytest.mark.ranks
@pytest.mark.parametrize("signalled", [[1], [0, 1]], ids=["one worker", "both workers"])
@pytest.mark.parametrize("known_s", [60.0, None], ids=["known to be long", "the first"])
def test_a_signal_in_a_long_evaluation_ends_all_workers_together(
    known_s: float | None, signalled: list[int], tmp_path: Path
) -> None:
    def body(group: Group) -> tuple[bool, int, list[int]]:
        status_exchange._PATIENCE_S = -1.0  # the signal presses at once
        flag = StopFlag(under_launcher=True)
        ended = False
        with suppress(InterruptedTraining), session_on(group, tmp_path, None, flag) as s:
            model = s.model(nn.Sequential(nn.BatchNorm1d(5), net()))
            s.optimizer(sgd(model))
            data = TensorDataset(*points())
            batches = s.loader(data, global_batch=BATCH, drop_last=True)
            test = s.eval_loader(TensorDataset(*points(11, seed=2)), batch_size=2)
            s.engine.context.progress.state.eval_s = known_s

            def judge(batch: object) -> dict[str, Tensor]:
                if group.rank in signalled:
                    flag.name = "SIGTERM"
                inputs, targets = pair_of(batch)
                return {"loss": F.cross_entropy(model(inputs), targets)}

            for _ in s.epochs(3):
                for batch in batches:
                    inputs, targets = pair_of(batch)
                    s.step(F.cross_entropy(model(inputs), targets))
                try:
                    s.evaluate(judge, test)
                except InterruptedTraining:
                    ended = True
                    s.engine.snapshots.flush()
                    s.barrier()  # nobody is left in another collective
                    raise
        return ended, s.engine.context.progress.state.epoch, s.engine.snapshots._store.steps()

    for ended, epoch, steps in run_ranks(2, body):
        assert ended
        assert (epoch, steps) == (0, [6])  # saved before or behind it, complete but for it


@pytest.mark.parametrize("name", ["a.b", "keys", "", "two words"])
def test_model_names_are_plain_words(name: str, tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s, pytest.raises(UsageError, match="plain word"):
            s.model(net(), name=name)

    run_ranks(1, body)


@pytest.mark.ranks
def test_a_step_that_the_script_takes_itself_is_refused(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            model = s.model(net())
            optimizer = s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=BATCH)
            for _ in s.epochs(1):
                inputs, targets = pair_of(next(iter(batches)))
                F.cross_entropy(model(inputs), targets).backward()
                with pytest.raises(UsageError, match=r"put s\.backward\(loss\) in the place"):
                    optimizer.step()
                optimizer.zero_grad()

    run_ranks(2, body)


def test_an_optimizer_of_a_model_that_isnt_taken_in_is_refused(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        with session_on(group, tmp_path) as s:
            s.optimizer(sgd(net()))
            with pytest.raises(UsageError, match=r"of no model of this session .* s\.model"):
                s.begin()

    run_ranks(1, body)
