"""Losses that aren't finite, signals, time budgets: every worker hears of them at the same step."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.checkpoint.store import SnapshotStore
from paceline.data.order import epoch_order, step_share
from paceline.distributed.group import Group
from paceline.errors import JobError, NonFiniteLossError
from paceline.metrics.counters import Totals
from paceline.training.evaluation import validation
from paceline.training.job import Job
from paceline.training.options import LoopOptions
from paceline.training.progress import TrainingProgress
from paceline.training.recipe_session import prepare
from paceline.training.setup import open_session
from paceline.training.status_exchange import Agreement, StopFlag
from tests.support.ranks import run_ranks
from tests.support.trainings import (
    Outcome,
    RecordingConsole,
    StopAt,
    configure,
    listed_job,
    noisy_job,
    pictures,
    plain_job,
    plain_net,
    prepared,
    run_training_on,
)

STEPS = 7


def poisoned_job(sample: int, from_forward: int) -> Job:
    """One training sample, the only white image, makes the loss infinite from some forward on."""
    data = pictures(50)
    data.images.clamp_(max=200)
    data.images[sample] = 255
    net = plain_net()
    forwards = 0

    def poison(module: torch.nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
        nonlocal forwards
        forwards += 1
        white = (inputs[0].flatten(1).amin(1) > 1.6) & (forwards >= from_forward)
        return outputs / (~white).to(outputs.dtype).unsqueeze(1)

    net.register_forward_hook(poison)
    return Job(model=net, train=data, validation=pictures(13, seed=2))


@pytest.mark.ranks
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize(("world_size", "step"), [(1, 3), (2, 2), (3, 5)])
@pytest.mark.core_cases(2)
def test_a_loss_that_isnt_finite_is_named_on_every_worker(
    world_size: int, step: int, epoch: int, tmp_path: Path
) -> None:
    last = world_size - 1
    found = step_share(50, step, 8, last, world_size)
    samples = epoch_order(50, 0, epoch)[found.start : found.stop].tolist()
    from_forward = 1 + epoch * (STEPS + 1)  # an epoch has one forward pass more, to evaluate

    def body(group: Group) -> str:
        config = configure(snapshot_every_steps=2)
        with pytest.raises(NonFiniteLossError) as caught:
            run_training_on(
                group, tmp_path, lambda: poisoned_job(samples[-1], from_forward), config
            )
        return str(caught.value)

    number = epoch * STEPS + step  # of steps before it
    for message in run_ranks(world_size, body):
        assert f"at epoch {epoch + 1}, step {number + 1}, on rank {last}, " in message
        assert f"for the training samples {', '.join(map(str, samples))}. " in message
    kept = SnapshotStore(prepared(tmp_path).snapshots, 3).newest_good(print)
    assert kept is not None
    assert 2 <= kept.step <= number
    assert all(tensor.isfinite().all() for tensor in kept.tensors["model"].values())


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, 2])
def test_a_signal_on_one_worker_stops_all_at_the_same_step(rank: int, tmp_path: Path) -> None:
    stop = StopAt(rank=rank, forward=5)
    outcomes = run_ranks(3, run_training_on, tmp_path, plain_job, configure(), stop)
    assert [o.step for o in outcomes] == [5] * 3
    assert [o.summary["stopped_because"] for o in outcomes] == ["signal"] * 3
    assert SnapshotStore(prepared(tmp_path).snapshots, 3).steps()[-1] == 5


@pytest.mark.ranks
def test_a_time_budget_that_is_over_ends_with_an_evaluation_and_a_snapshot(tmp_path: Path) -> None:
    config = configure(time_budget="0.001s", schedule="cosine", epochs=50)
    outcomes = run_ranks(2, run_training_on, tmp_path, plain_job, config, None)
    assert {o.step for o in outcomes} == {1}
    summary = outcomes[0].summary
    assert summary["stopped_because"] == "time"
    assert summary["val_samples"] == 13
    assert summary["val_loss"] is not None
    assert summary["best_epoch"] == 1
    assert [row["epoch"] for row in outcomes[0].rows] == ["1"]
    assert SnapshotStore(prepared(tmp_path).snapshots, 3).steps() == [1]


@pytest.mark.ranks
@pytest.mark.parametrize("make_job", [plain_job, noisy_job, listed_job])
@pytest.mark.slow
def test_a_generous_time_budget_changes_nothing(
    tmp_path: Path, make_job: Callable[[], Job]
) -> None:
    """Timing an evaluation beforehand touches no random number and no running statistic."""

    def train(name: str, budget: str | None) -> list[Outcome]:
        config = configure(time_budget=budget, schedule="cosine")
        return run_ranks(2, run_training_on, tmp_path / name, make_job, config, None)

    timed, free = train("hour", "1h"), train("free", None)
    for name in ("weights_sha256", "state_sha256", "val_loss"):
        assert timed[0].summary[name] == free[0].summary[name]
    assert timed[0].rows == free[0].rows
    for with_budget, without in zip(timed, free, strict=True):
        assert len(with_budget.evaluated) == len(without.evaluated) + 1, "none was timed"


@pytest.mark.ranks
def test_all_workers_expect_the_evaluation_of_the_slowest(tmp_path: Path) -> None:
    def body(group: Group) -> tuple[float | None, list[str]]:
        def slow(*_: object) -> float:
            return 2.0 if group.rank == 1 else 0.5

        vars(validation)["time_batches"] = slow  # a forked process
        config = configure(time_budget="30s")
        with open_session(config, prepared(tmp_path), group, StopFlag(under_launcher=True)) as s:
            training = prepare(s, plain_job(val_samples=13))
            s.engine.context.console = console = RecordingConsole()
            next(s.epochs(1))
            s.engine.validation.measure_time(training.evaluate_batch, training.validation)
            return s.engine.context.progress.timed_eval_s, console.lines

    (timed_s, told), (other_s, other_told) = run_ranks(2, body)
    assert timed_s == other_s == 14.0  # 7 of the 13 samples
    assert not told
    assert not other_told


@pytest.mark.parametrize("timed_s", [8.0, 8.0001])
def test_a_timed_evaluation_ends_the_training_in_time(timed_s: float) -> None:
    """Of 30 s, 1.25 x 8 + 1 = 11 s are kept back: at 19 s it is over."""
    loop = LoopOptions(time_budget="30s")
    progress = TrainingProgress(
        loop=loop, snapshot_every_steps=None, snapshot_every_s=None, val_samples=100
    )
    progress.timed_eval_s = timed_s
    progress.add_pause(18.9999)
    progress.advance(agreement_of(lap_s=0.0))
    assert (progress.stopping is not None) == (timed_s > 8)
    progress.advance(agreement_of(lap_s=0.0001))
    assert progress.stopping == "time"
    progress.add_evaluation(12.0)
    budget = progress.describe_budget(saving_s=0.5)
    assert budget is not None
    assert budget["used_s"] == pytest.approx(31.5)
    assert budget["evaluation_s"] == 12.0
    assert budget["kept_back_s"] == pytest.approx(11.0, abs=0.01)


def test_a_step_that_would_end_after_the_budget_is_not_begun() -> None:
    loop = LoopOptions(time_budget="60s")
    progress = TrainingProgress(loop=loop, snapshot_every_steps=None, snapshot_every_s=None)
    progress.state.eval_s = 4.0  # 6 s are kept back
    stops = []
    for lap_s in (20.0, 10.0, 10.0, 10.0):
        progress.state.step += 1
        progress.advance(agreement_of(lap_s=lap_s))
        stops.append((progress.state.elapsed_s, progress.stopping))
    assert stops == [(20.0, None), (30.0, None), (40.0, None), (50.0, "time")]


def test_an_epoch_that_ends_near_the_budgets_end_is_the_last() -> None:
    """Another step would need another evaluation: 5 of 6 s that are kept back are gone."""
    loop = LoopOptions(time_budget="60s", epochs=100)
    progress = TrainingProgress(loop=loop, snapshot_every_steps=None, snapshot_every_s=None)
    progress.advance(agreement_of(lap_s=53.0))
    assert progress.stopping is None
    progress.add_evaluation(4.0)
    progress.close_epoch(validated=True)
    assert (progress.state.epoch, progress.state.ended) == (1, "time")
    assert not progress.can_continue


def test_a_test_set_counts_in_what_is_kept_back() -> None:
    loop = LoopOptions(time_budget="100s")
    progress = TrainingProgress(
        loop=loop, snapshot_every_steps=None, snapshot_every_s=None, val_samples=100
    )
    progress.timed_eval_s, progress.test_samples = 8.0, 300
    progress.add_pause(59.0)
    progress.advance(agreement_of(lap_s=0.0))
    assert progress.stopping == "time"  # 1.25 x (8 + 24) + 1 = 41 s are kept back


def agreement_of(lap_s: float) -> Agreement:
    """Make an agreement about nothing but time."""
    nothing = torch.empty(0)
    return Agreement(
        signalled=False,
        bad=None,
        totals=Totals(),
        lap_s=lap_s,
        data_s=0.0,
        waits_s=(0.0,),
        counted=nothing,
        more=nothing,
    )


@pytest.mark.ranks
def test_target_accuracy_ends_a_training(tmp_path: Path) -> None:
    config = configure(target_accuracy=0.0001, patience=2, epochs=9)
    outcome = run_ranks(2, run_training_on, tmp_path, plain_job, config, None)[0]
    assert (outcome.summary["stopped_because"], outcome.epoch) == ("target", 2)


def infinite_in_evaluation() -> Job:
    net = plain_net()
    job = Job(model=net, train=pictures(50), validation=pictures(13, seed=2))

    def spoil(module: torch.nn.Module, inputs: tuple[Tensor, ...], outputs: Tensor) -> Tensor:
        return outputs if torch.is_grad_enabled() else outputs * torch.inf

    net.register_forward_hook(spoil)
    return job


@pytest.mark.ranks
def test_a_validation_loss_that_isnt_finite_is_no_result(tmp_path: Path) -> None:
    outcome = run_ranks(
        2, run_training_on, tmp_path, infinite_in_evaluation, configure(epochs=2), None
    )[0]
    assert outcome.summary["val_loss"] is None
    assert outcome.summary["best_epoch"] is None
    assert [row["val_loss"] for row in outcome.rows] == ["", ""]
    assert outcome.summary["stopped_because"] == "epochs"


@pytest.mark.ranks
def test_going_on_with_another_data_set_is_refused(tmp_path: Path) -> None:
    stop = StopAt(rank=0, forward=2)
    run_ranks(2, run_training_on, tmp_path, plain_job, configure(), stop)

    def body(group: Group) -> str:
        with pytest.raises(JobError) as caught:
            run_training_on(group, tmp_path, lambda: plain_job(51), configure())
        return str(caught.value)

    said = "the training began with 50 training samples, and now there are 51"
    assert all(said in message for message in run_ranks(2, body))
