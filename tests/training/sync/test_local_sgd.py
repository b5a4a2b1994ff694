"""Local steps in whole trainings: alike at the end of each epoch, exact through stops."""

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.checkpoint.format import Snapshot
from paceline.checkpoint.store import SnapshotStore
from paceline.distributed.group import Group
from paceline.errors import InterruptedTraining, NonFiniteLossError, UsageError
from paceline.options.fields import OptionValue
from paceline.training.hooks.base import ADDED_HOOKS, StepHook
from paceline.training.status_exchange import StopFlag
from tests.support.ranks import run_ranks
from tests.support.sessions import net, pair_of, plain_loop, points, session_on, weights_of
from tests.support.tiers import slow
from tests.support.trainings import (
    Outcome,
    StopAt,
    configure,
    noisy_job,
    plain_job,
    prepared,
    run_training_on,
)

pytestmark = pytest.mark.ranks
# 50 samples in batches of 8: 7 steps an epoch, the last with 2 samples.
STEPS = 7
LOCAL: dict[str, OptionValue] = {"sync": "local", "sync_warmup_steps": 3, "sync_every": 3}
DILOCO: dict[str, OptionValue] = {**LOCAL, "sync": "diloco", "outer_lr": 0.5}


def train(
    world_size: int, directory: Path, settings: dict[str, OptionValue], stop: StopAt | None = None
) -> list[Outcome]:
    """Train from wherever the directory stands until a worker is asked to stop, or to the end."""
    config = configure(**settings)
    return run_ranks(world_size, run_training_on, directory, noisy_job, config, stop)


def trained_rows(outcomes: list[Outcome]) -> list[dict[str, str]]:
    """Take the epochs' rows without what a start has sent and waited for."""
    own = {"exposed_comm", "waiting", "wire_bytes_per_step"}
    return [{n: c for n, c in row.items() if n not in own} for row in outcomes[0].rows]


def newest(directory: Path) -> Snapshot:
    found = SnapshotStore(prepared(directory).snapshots, 3).newest_good(print)
    assert found is not None
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.core_cases(1)
def test_averaging_after_every_step_is_all_reduce(world_size: int, tmp_path: Path) -> None:
    """Without momentum; also with the last batch, of which rank 2 has no sample."""
    settings: dict[str, OptionValue] = {"optimizer": "sgd", "momentum": 0.0, "epochs": 2}
    every: dict[str, OptionValue] = {"sync": "local", "sync_every": 1, "sync_warmup_steps": 0}
    for more in [{}, {"max_batch_per_worker": 2}][: max(1, world_size - 1)]:
        found, expected = (
            run_ranks(
                world_size,
                run_training_on,
                tmp_path / f"{len(more)}-{len(extra)}",
                plain_job,
                configure(**settings, **more, **extra),
                None,
            )
            for extra in (every, {})
        )
        for mine, right in zip(found, expected, strict=True):
            for got, wanted in zip(mine.parameters, right.parameters, strict=True):
                torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(mine.losses, right.losses, rtol=1e-4, atol=1e-6)
        if world_size == 1:  # nothing to average: no bit is another
            assert found[0].summary["weights_sha256"] == expected[0].summary["weights_sha256"]


CASES: list[dict[str, OptionValue]] = [
    {**LOCAL, "sync_delay": 0, "optimizer": "adamw"},
    {**LOCAL, "sync_precision": "int8", "sync_parts": 2, "clip_norm": 1.0},
    {**DILOCO, "sync_delay": 2, "optimizer": "sgd", "momentum": 0.9},
    {**DILOCO, "sync_delay": 2, "sync_precision": "int8", "optimizer": "adamw"},
    {**LOCAL, "sync_delay": 2, "precision": "fp16", "max_batch_per_worker": 2},
    {**DILOCO, "sync_warmup_steps": 0, "sync_precision": "bf16", "optimizer": "novograd"},
]


def called(settings: dict[str, OptionValue]) -> str:
    return "-".join(str(value) for value in settings.values())


@pytest.mark.parametrize("settings", [*CASES[:4], *map(slow, CASES[4:])], ids=called)
@pytest.mark.slow
def test_resuming_within_a_round_changes_no_bit(
    settings: dict[str, OptionValue], tmp_path: Path
) -> None:
    pieces = 2 if "max_batch_per_worker" in settings else 1
    stops = [
        StopAt(rank=0, forward=6 * pieces + 1),  # after the pass's last step, before its end
        StopAt(rank=1, forward=5 * pieces),  # within a round; with a delay, with a part under way
    ]
    whole = train(2, tmp_path / "whole", settings)
    legs = [train(2, tmp_path / "legs", settings, stop) for stop in (*stops, None)]
    resumed, apart = legs[-1], legs[1]
    assert [(leg[0].epoch, leg[0].step_in_epoch) for leg in legs[:-1]] == [(0, 7), (1, 5)]
    assert resumed[0].summary["weights_sha256"] == whole[0].summary["weights_sha256"]
    assert resumed[0].summary["state_sha256"] == whole[0].summary["state_sha256"]
    assert trained_rows(resumed) == trained_rows(whole)
    for mine, right in zip(resumed, whole, strict=True):
        assert all(map(torch.equal, mine.parameters, right.parameters))
        assert mine.optimizer == right.optimizer
        assert all(map(torch.equal, mine.parameters, whole[0].parameters))  # alike at the end
        assert mine.optimizer == whole[0].optimizer
    assert not all(map(torch.equal, apart[0].parameters, apart[1].parameters))  # apart within
    assert apart[0].summary["weights_sha256"] == apart[1].summary["weights_sha256"]  # the average


@pytest.mark.parametrize(
    ("worlds", "sync"), [((2, 3), "local"), ((2, 1), "local"), ((1, 2), "diloco")]
)
@pytest.mark.core_cases(1)
def test_other_workers_go_on_from_the_average(
    worlds: tuple[int, int], sync: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = {**LOCAL, "sync": sync, "sync_delay": 2, "momentum": 0.9, "optimizer": "sgd"}
    before, after = worlds
    first = train(before, tmp_path, settings, StopAt(rank=0, forward=5))
    saved = newest(tmp_path).tensors
    for name, parameters in zip(
        [name for name, _ in noisy_job().model.named_parameters()],
        zip(*(one.parameters for one in first), strict=True),
        strict=True,
    ):
        torch.testing.assert_close(saved["model"][name], torch.stack(parameters).mean(0))
        slot = f"{name}/momentum_buffer"
        if before > 1:
            rows = [saved["sync"][f"worker-{rank}/optimizer-0/{slot}"] for rank in range(before)]
            torch.testing.assert_close(saved["optimizer"][slot], torch.stack(rows).mean(0))
            assert not torch.equal(rows[0], rows[1])
    capfd.readouterr()
    then = train(after, tmp_path, settings)
    said = "all continue from the average" in capfd.readouterr().out
    assert said == (before > 1 or sync == "diloco")
    assert (first[0].step, then[0].epoch, then[0].summary["samples_seen"]) == (5, 3, 150)
    for other in then[1:]:
        assert all(map(torch.equal, other.parameters, then[0].parameters))
        assert other.optimizer == then[0].optimizer


@pytest.mark.slow
def test_plain_training_goes_on_from_local_steps_and_back(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert train(2, tmp_path, LOCAL, StopAt(rank=0, forward=5))[0].step == 5
    capfd.readouterr()
    assert train(2, tmp_path, {}, StopAt(rank=0, forward=6))[0].step == 11
    said = capfd.readouterr().out
    assert "written with --sync local" in said
    assert "all continue from the average" in said
    ended = train(2, tmp_path, DILOCO)
    assert ended[0].step == 21
    assert "written with --sync allreduce" in capfd.readouterr().out
    assert all(map(torch.equal, ended[0].parameters, ended[1].parameters))


def script(
    group: Group,
    directory: Path,
    settings: Mapping[str, OptionValue],
    stop: int | None = None,
) -> tuple[list[Tensor], list[float], list[Tensor]]:
    """Evaluates within epochs, trains two models, and leaves its second epoch early."""
    flag = StopFlag(under_launcher=True)
    with session_on(group, directory, settings, flag) as s:
        model, last = s.model(net()), s.model(nn.Linear(2, 2), name="last")
        s.optimizer(torch.optim.Adam(model.parameters(), 0.01))
        s.optimizer(torch.optim.SGD(last.parameters(), 0.1, momentum=0.9))
        batches = s.loader(TensorDataset(*points()), global_batch=8)
        test = s.eval_loader(TensorDataset(*points(11, seed=2)))
        figures, ends = [], []
        with suppress(InterruptedTraining):
            for epoch in s.epochs(3):
                for batch in batches:
                    at = s.engine.context.progress.state.step_in_epoch
                    inputs, targets = pair_of(batch)
                    s.step(F.cross_entropy(last(model(inputs)), targets))
                    if at == 4:
                        before = weights_of(model, last)
                        found = s.evaluate(
                            lambda b: {"loss": F.cross_entropy(last(model(b[0])), b[1])},  # type: ignore[index]
                            test,
                        )
                        figures.append(found["loss"])
                        assert all(map(torch.equal, before, weights_of(model, last)))
                        if epoch == 1:
                            break
                    if s.engine.context.progress.state.step == stop:
                        flag.name = "SIGTERM"
                s.evaluate(lambda _: {"accuracy": 0.5}, test)
                ends += weights_of(model, last)
        return weights_of(model, last), figures, ends


@pytest.mark.slow
def test_scripts_evaluate_break_and_resume(tmp_path: Path) -> None:
    settings = {**DILOCO, "sync_delay": 1, "sync_warmup_steps": 1}
    whole = run_ranks(2, script, tmp_path / "whole", settings)
    again = run_ranks(2, script, tmp_path / "again", settings)
    for (mine, figures, ends), (theirs, their_figures, their_ends) in zip(
        whole, again, strict=True
    ):
        assert all(map(torch.equal, mine, theirs))
        assert all(map(torch.equal, ends, their_ends))
        assert figures == their_figures == whole[0][1]  # of the average: the same on every worker
        assert all(map(torch.equal, mine, whole[0][0]))
    stopped = run_ranks(2, script, tmp_path / "legs", settings, 4)
    resumed = run_ranks(2, script, tmp_path / "legs", settings, None)
    assert not all(map(torch.equal, stopped[0][0], stopped[1][0]))
    for (mine, _, _), (theirs, _, _) in zip(resumed, whole, strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_one_worker_trains_as_without(tmp_path: Path) -> None:
    def body(group: Group) -> list[Tensor]:
        with session_on(group, tmp_path, {**LOCAL, "sync_delay": 1}) as s:
            model = s.model(net())
            s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            batches = s.loader(TensorDataset(*points()), global_batch=8)
            for _ in s.epochs(2):
                for batch in batches:
                    s.step(F.cross_entropy(model(pair_of(batch)[0]), pair_of(batch)[1]))
            return weights_of(model)

    (found,) = run_ranks(1, body)
    assert all(map(torch.equal, found, plain_loop()))


def test_a_parameter_without_gradients_on_one_worker_and_what_is_waited_for(
    tmp_path: Path,
) -> None:
    """Its optimizer's state is the mean of those that have one; figures for the profile."""

    def body(group: Group) -> tuple[list[Tensor], list[Tensor], float, float]:
        with session_on(group, tmp_path, {**LOCAL, "sync_warmup_steps": 0}) as s:
            model, spare = s.model(net()), s.model(nn.Linear(5, 2), name="spare")
            both = [*model.parameters(), *spare.parameters()]
            adam = s.optimizer(torch.optim.Adam(both, lr=0.01))
            batches = s.loader(TensorDataset(*points()), global_batch=8)
            for _ in s.epochs(1):
                for batch in batches:
                    inputs, targets = pair_of(batch)
                    scores = model(inputs)
                    if group.rank:
                        scores = scores + spare(inputs)
                    s.step(F.cross_entropy(scores, targets))
            state = [t for p in spare.parameters() for t in adam.state[p].values()]
            profiler = s.engine.context.profiler
            assert profiler.averaging is not None
            assert profiler.wire_bytes() == 0  # of gradients
            return (
                weights_of(model, spare),
                state,
                profiler.averaging.source.sent_bytes,
                profiler.averaging.source.waited_s,
            )

    found = run_ranks(2, body)
    for weights, state, sent, waited_s in found:
        assert all(map(torch.equal, weights, found[0][0]))
        assert len(state) == 6
        assert all(map(torch.equal, state, found[0][1]))
        assert sent > 0
        assert waited_s > 0


def test_weights_that_are_no_numbers_on_one_worker_are_an_error_of_all(tmp_path: Path) -> None:
    def body(group: Group) -> str:
        with session_on(group, tmp_path, {**LOCAL, "sync_warmup_steps": 0}) as s:
            model = s.model(net())
            s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            batches = s.loader(TensorDataset(*points()), global_batch=8)
            epochs = s.epochs(1)
            next(epochs)
            drawn = iter(batches)
            next(drawn)
            if group.rank == 1:
                with torch.no_grad():
                    next(model.parameters()).fill_(float("nan"))
            with pytest.raises(NonFiniteLossError) as caught:
                s.snapshot()
            s.engine.epoch.is_open = False
            return str(caught.value)

    for said in run_ranks(2, body):
        assert "the weights became NaN or infinite by step 0" in said


def test_only_batches_of_the_training_loader_are_trained_on(tmp_path: Path) -> None:
    def body(group: Group) -> str:
        with session_on(group, tmp_path, LOCAL) as s:
            model = s.model(net())
            s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            s.begin()
            with pytest.raises(UsageError) as caught:
                s.step(model(torch.ones(2, 5)).sum())
            return str(caught.value)

    for world_size in (1, 2):
        for said in run_ranks(world_size, body):
            assert "with --sync local or diloco a step is about a batch" in said


class Onlooker(StepHook):
    """Stands for `paceline verify`."""

    needs_equal_weights = True


def test_there_is_nothing_to_verify(tmp_path: Path) -> None:
    def body(group: Group) -> str:
        ADDED_HOOKS.set((Onlooker(),))
        with pytest.raises(UsageError) as caught, session_on(group, tmp_path, LOCAL):
            pass
        return str(caught.value)

    for world_size in (1, 2):
        for said in run_ranks(world_size, body):
            assert "nothing to verify: leave --sync out" in said


def test_loss_scales_are_each_workers_own_until_the_pass_ends(tmp_path: Path) -> None:
    def body(group: Group, stop: int | None) -> list[float]:
        flag = StopFlag(under_launcher=True)
        with session_on(group, tmp_path, {**LOCAL, "precision": "fp16"}, flag) as s:
            model, scaler, scales = s.model(net()), s.engine.context.scaler, []
            assert scaler is not None
            s.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            batches = s.loader(TensorDataset(*points()), global_batch=8)
            with suppress(InterruptedTraining):
                for _ in s.epochs(1):
                    for batch in batches:
                        scales.append(scaler.get_scale())
                        s.step(F.cross_entropy(model(pair_of(batch)[0]), pair_of(batch)[1]))
                        if (
                            s.engine.context.progress.state.step == stop
                        ):  # as if rank 1 had overflowed
                            scaler.load_state_dict(
                                {**scaler.state_dict(), "scale": 1024.0 / (1 + group.rank)}
                            )
                            flag.name = "SIGTERM"
            return [*scales, scaler.get_scale()]

    stopped, resumed = run_ranks(2, body, 4), run_ranks(2, body, None)
    assert [scales[-1] for scales in stopped] == [1024, 512]
    assert [scales[0] for scales in resumed] == [1024, 512]
    assert [scales[-1] for scales in resumed] == [512, 512]
