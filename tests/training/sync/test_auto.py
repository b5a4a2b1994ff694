"""Auto measures, chooses, and keeps to it."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from paceline.distributed.group import Group
from paceline.options.fields import OptionValue
from paceline.training import step_times
from paceline.training.context import TrainingContext
from paceline.training.profiling.profile_writer import Profiler
from paceline.training.sync import auto
from paceline.training.sync.auto import AutoSync
from paceline.training.sync.auto_policy import Choice
from tests.support.ranks import run_ranks
from tests.support.sessions import net, pair_of, points, session_on, sgd
from tests.support.tiers import slow
from tests.support.trainings import (
    MakeJob,
    Outcome,
    StopAt,
    configure,
    noisy_job,
    run_training_on,
)
from tests.training.sync.test_auto_policy import profile
from tests.training.sync.test_powersgd import errors_of, wide_job

pytestmark = pytest.mark.ranks
AUTO: dict[str, OptionValue] = {"sync": "auto", "optimizer": "sgd", "momentum": 0.9}
LOCAL = Choice(method="local", why="a test says so", every=3, delay=1, half_first=True)
AUTO_SCRIPT: dict[str, OptionValue] = {"sync": "auto", "progress": "plain"}
HALF = Choice(method="bf16", why="a test says so")
THIN = Choice(method="powersgd", why="a test says so", half_first=True)


def train(
    group: Group,
    directory: Path,
    first: Choice | None,
    final: Choice | None,
    epochs: int,
    stop: StopAt | None,
    job: MakeJob = noisy_job,
    warmup_steps: int | None = None,
) -> Outcome:
    """Measure for eight steps each, and come to these choices; None: to what is measured."""
    auto._MIN_S = 0.0
    if first is not None or final is not None:
        chosen = {"first_choice": lambda _: first, "final_choice": lambda *_, **__: final}
        vars(auto).update(chosen)
    config = configure(epochs=epochs, sync_warmup_steps=warmup_steps, **AUTO)
    (directory / "run.json").parent.mkdir(exist_ok=True)
    if group.rank == 0 and not (directory / "run.json").exists():
        (directory / "run.json").write_text(json.dumps({"derived": {"device": "cpu"}}))
    return run_training_on(group, directory, job, config, stop)


def noted(directory: Path) -> dict[str, object]:
    found: dict[str, object] = json.loads((directory / "run.json").read_text())["derived"]
    return found


class Clock:
    """Stands for `perf_counter`: steps take as long as a test says, by what gradients travel in.

    A worker's own clock: those of other ranks than 0 go ten times as slow, and don't count.
    """

    def __init__(self, group: Group, full_s: float, half_s: float) -> None:
        self._rate = 1.0 if group.rank == 0 else 0.1
        self._full_s, self._half_s, self._now_s = full_s, half_s, 0.0
        self.sync: AutoSync | None = None

    def __call__(self) -> float:
        half = self.sync is not None and self.sync.rounding.dtype is torch.bfloat16
        self._now_s += self._rate * (self._half_s if half else self._full_s)
        return self._now_s


# Of 100 ms of computation. Of bf16's 105 ms 5 are communication, as much as is allowed.
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    ("exposed_s", "half_s", "method", "why"),
    [
        (0.005, 0.105, "allreduce", "communication that nothing hides takes 4.8 % of a step"),
        (0.1, 0.105, "bf16", "communication takes 50 % of a step of 200 ms; with half the bytes"),
        (0.1, 0.2, "local", "communication takes 50 % of a step of 200 ms, and 50 % of 200 ms"),
    ],
)
@pytest.mark.core_cases(1)
def test_what_it_measures_leads_to_a_choice(
    world_size: int, exposed_s: float, half_s: float, method: str, why: str, tmp_path: Path
) -> None:
    def body(group: Group) -> Outcome:
        clock, init = Clock(group, 0.1 + exposed_s, half_s), AutoSync.__init__

        def made(self: AutoSync, context: TrainingContext) -> None:
            init(self, context)
            clock.sync = self
            auto._MIN_S = 0.5  # for rank 0's clock eight steps are enough

        AutoSync.__init__ = made  # type: ignore[method-assign]  # this process ends with the test
        Profiler.profile = lambda *_: profile(exposed_s, world_size)  # type: ignore[method-assign]
        vars(step_times).update({"perf_counter": clock})
        return train(group, tmp_path, None, None, 3, None)

    found = run_ranks(world_size, body)
    assert [outcome.summary["sync_chosen"] for outcome in found] == [method] * world_size
    assert {outcome.summary["sync"] for outcome in found} == {"auto"}
    told = str(noted(tmp_path)["sync"])
    assert told.startswith(f"auto: {method}")
    assert why in told
    assert noted(tmp_path)["device"] == "cpu"
    assert any(told in line for line in found[0].lines)
    assert all(map(torch.equal, found[0].parameters, found[1].parameters))


def test_one_worker_has_nothing_to_measure(tmp_path: Path) -> None:
    (found,) = run_ranks(1, train, tmp_path, None, None, 1, None)
    assert found.summary["sync_chosen"] is None


# A pass of 7 steps gives 6 times, 8 are enough: bf16 is tried from step 10 on, the choice is made
# at step 20, and `local` begins with the fourth epoch, at step 21.
@pytest.mark.parametrize(
    ("final", "forward"),
    [slow(LOCAL, 20), (LOCAL, 25), slow(HALF, 25)],
    ids=["local-chosen", "local-under-way", "bf16"],
)
@pytest.mark.slow
def test_a_resumed_training_keeps_the_choice_exactly(
    final: Choice, forward: int, tmp_path: Path
) -> None:
    whole = run_ranks(2, train, tmp_path / "whole", None, final, 5, None)
    stop = StopAt(rank=1, forward=forward)
    cut = run_ranks(2, train, tmp_path / "legs", None, final, 5, stop)
    assert cut[0].step == forward
    resumed = run_ranks(2, train, tmp_path / "legs", None, final, 5, None)
    assert resumed[0].summary["sync_chosen"] == final.method
    assert resumed[0].summary["weights_sha256"] == whole[0].summary["weights_sha256"]
    assert all(map(torch.equal, resumed[1].parameters, whole[1].parameters))
    assert resumed[0].rows[-1]["train_loss"] == whole[0].rows[-1]["train_loss"]


# The steps as above: PowerSGD begins with the choice, or 2 steps later with the warm-up's end.
@pytest.mark.parametrize(
    ("forward", "warmup_steps"),
    [slow(20, None), slow(25, None), slow(21, 22), (26, 22)],
    ids=["chosen", "under-way", "warming-up", "warm"],
)
@pytest.mark.slow
def test_a_resumed_training_goes_on_with_powersgd_exactly(
    forward: int, warmup_steps: int | None, tmp_path: Path
) -> None:
    rest = (wide_job, warmup_steps)
    whole = run_ranks(2, train, tmp_path / "whole", None, THIN, 4, None, *rest)
    stop = StopAt(rank=1, forward=forward)
    cut = run_ranks(2, train, tmp_path / "legs", None, THIN, 4, stop, *rest)
    assert cut[0].step == forward
    errors = errors_of(tmp_path / "legs")
    assert bool(errors) == (forward > (warmup_steps or 20))
    assert all(not torch.equal(*rows) for rows in errors.values())
    resumed = run_ranks(2, train, tmp_path / "legs", None, None, 4, None, *rest)
    assert resumed[0].summary["sync_chosen"] == "powersgd"
    assert resumed[0].summary["weights_sha256"] == whole[0].summary["weights_sha256"]
    assert all(map(torch.equal, resumed[1].parameters, whole[1].parameters))
    assert resumed[0].optimizer == whole[0].optimizer
    assert resumed[0].rows == whole[0].rows


@pytest.mark.slow
def test_bf16_is_tried_and_left_again(tmp_path: Path) -> None:
    plain = Choice(method="allreduce", why="a test says so")
    found = run_ranks(2, train, tmp_path, None, plain, 3, None)
    assert found[0].summary["sync_chosen"] == "allreduce"
    straight = run_ranks(2, train, tmp_path / "straight", plain, None, 3, None)
    assert straight[0].summary["sync_chosen"] == "allreduce"
    assert straight[0].losses[:8] == found[0].losses[:8]
    assert straight[0].losses[-1] != found[0].losses[-1]  # bf16 had been there


@pytest.mark.slow
def test_other_workers_measure_again(tmp_path: Path) -> None:
    run_ranks(2, train, tmp_path, None, HALF, 5, StopAt(rank=0, forward=20))
    found = run_ranks(3, train, tmp_path, LOCAL, None, 9, None)
    assert found[0].summary["sync_chosen"] == "local"
    assert found[0].step == 63


@pytest.mark.slow
def test_other_workers_measure_again_after_powersgd(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, train, tmp_path, None, THIN, 4, StopAt(rank=0, forward=25), wide_job)
    assert errors_of(tmp_path)
    found = run_ranks(3, train, tmp_path, HALF, None, 6, None, wide_job)
    assert "auto measures again: it chose for 2 workers, and now there are 3" in (
        capfd.readouterr().out
    )
    assert found[0].summary["sync_chosen"] == "bf16"
    assert found[0].step == 42
    assert all(map(torch.equal, found[0].parameters, found[1].parameters))


# An epoch has 12 steps; of these 9 are needed for a choice.
@pytest.mark.parametrize(("warmup_steps", "half_steps"), [(None, 3), (9, 0), (2, 0)])
@pytest.mark.core_cases(2)
def test_powersgd_waits_for_the_warm_up_in_half_precision(
    warmup_steps: int | None, half_steps: int, tmp_path: Path
) -> None:
    """What one worker sends for a step: in full, in bf16, and from the warm-up's end thin."""

    def body(group: Group) -> list[float]:
        auto._MIN_S = 0.0
        vars(auto).update({"first_choice": lambda _: THIN})
        settings = {**AUTO_SCRIPT, "sync_warmup_steps": warmup_steps}
        with session_on(group, tmp_path, settings) as s:
            model = s.model(nn.Linear(30, 40))
            s.optimizer(sgd(model))
            rows = torch.randn(48, 30, generator=torch.Generator().manual_seed(3))
            batches, sent = s.loader(TensorDataset(rows, rows), global_batch=4), []
            for _ in s.epochs(2):
                for batch in batches:
                    sent.append(s.engine.context.profiler.wire_bytes())
                    s.step(model(pair_of(batch)[0]).square().mean())
            sync = s.engine.sync
            assert isinstance(sync, AutoSync)
            assert sync.rounding.dtype is None
            assert s.engine.context.profiler.sync == "powersgd"
            return sent

    full, thin = 4 * (30 * 40 + 40), 4 * (4 * (30 + 40) + 40)
    for sent in run_ranks(2, body):
        assert sent == [full] * 9 + [full / 2] * half_steps + [thin] * (15 - half_steps)


def test_epochs_of_one_step_are_measured_as_well(tmp_path: Path) -> None:
    def body(group: Group) -> str:
        auto._MIN_S = 0.0
        vars(auto).update({"first_choice": lambda _: HALF})
        with session_on(group, tmp_path, AUTO_SCRIPT) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points(8)), global_batch=8)
            for _ in s.epochs(9):
                for batch in batches:
                    s.step(F.cross_entropy(model(pair_of(batch)[0]), pair_of(batch)[1]))
            sync = s.engine.sync
            assert isinstance(sync, AutoSync)
            return str(sync.label)

    for said in run_ranks(2, body):
        assert said == "auto: bf16, since a test says so"


def test_rank_0_alone_chooses_and_only_what_the_training_can_bear(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A script that steps outside the loop has no local steps, whenever it begins to."""

    def body(group: Group) -> str:
        auto._MIN_S = 0.0

        def choose(_: object) -> Choice:
            assert group.rank == 0
            return LOCAL

        vars(auto).update({"first_choice": choose})
        with session_on(group, tmp_path, AUTO_SCRIPT) as s:
            model = s.model(net())
            s.optimizer(sgd(model))
            batches = s.loader(TensorDataset(*points()), global_batch=8)
            for epoch in s.epochs(4):
                if epoch == 2:  # the choice is made, and hasn't begun
                    s.step(model(torch.ones(2, 5)).square().mean())
                for batch in batches:
                    s.step(F.cross_entropy(model(pair_of(batch)[0]), pair_of(batch)[1]))
            sync = s.engine.sync
            assert isinstance(sync, AutoSync)
            return str(sync.label)

    for said in run_ranks(2, body):
        assert said.startswith("auto: bf16, since local steps don't go with this training")
    assert capfd.readouterr().out.count("local steps don't go with this training") == 1


@pytest.mark.slow
def test_a_resumed_training_that_cannot_be_local_goes_on_alike(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_ranks(2, train, tmp_path, LOCAL, None, 5, StopAt(rank=1, forward=16))

    def body(group: Group) -> Outcome:
        vars(auto).update({"can_be_local": lambda _: False})
        return train(group, tmp_path, LOCAL, None, 5, None)

    found = run_ranks(2, body)
    assert found[0].summary["sync_chosen"] == "bf16"
    assert found[0].step == 35
    assert "all continue from the average" in capfd.readouterr().out
