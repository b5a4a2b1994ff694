from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.data.order import cut
from paceline.distributed.group import Group
from paceline.distributed.work_division import Division
from paceline.training.batches.plan import TrainPlan
from paceline.training.components import Components
from paceline.training.hooks.load_balancing import LoadBalancer, better_shares, proportional
from paceline.training.job import Job
from paceline.training.profiling import step_timeline
from paceline.training.progress import TrainingProgress
from paceline.training.snapshots.train_state import TrainState
from tests.support.ranks import run_ranks
from tests.support.trainings import (
    SIDE,
    Outcome,
    configure,
    global_batches,
    pictures,
    run_training_on,
)


@given(speeds=st.lists(st.floats(0.01, 100), min_size=1, max_size=9), extra=st.integers(0, 500))
def test_every_sample_has_one_worker_and_every_worker_a_sample(
    speeds: list[float], extra: int
) -> None:
    total = len(speeds) + extra
    parts = proportional(total, speeds)
    assert sum(parts) == total
    assert min(parts) >= 1
    exact = [1 + extra * speed / sum(speeds) for speed in speeds]
    assert all(abs(part - value) < 1 for part, value in zip(parts, exact, strict=True))


@given(parts=st.lists(st.integers(1, 20), min_size=1, max_size=8), share=st.integers(0, 200))
def test_short_batches_are_cut_whole_in_the_same_proportion(parts: list[int], share: int) -> None:
    bounds = [sum(parts[:i]) for i in range(len(parts) + 1)]
    total = share % (bounds[-1] + 1)
    cuts = [cut(total, part, len(parts), bounds) for part in range(len(parts))]
    assert cuts[0][0] == 0
    assert cuts[-1][1] == total
    assert all(before[1] == after[0] for before, after in pairwise(cuts))
    assert [cut(bounds[-1], i, len(parts), bounds) for i in range(len(parts))] == [
        (bounds[i], bounds[i + 1]) for i in range(len(parts))
    ]


def test_shares_change_only_for_a_gain() -> None:
    assert better_shares((32, 32), [100.0, 101.0]) is None
    assert better_shares((32, 32), [100.0, 300.0]) == (17, 47)
    assert better_shares((32, 32), [0.0, 300.0]) is None


class Clock:
    """Stands still but for what the model takes: a busy machine changes nothing."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Timed(nn.Module):
    """Moves a clock on for each sample."""

    def __init__(self, clock: Clock, sample_s: float) -> None:
        super().__init__()
        self.layer = nn.Linear(SIDE * SIDE, 3)
        self.clock, self.sample_s = clock, sample_s

    def forward(self, inputs: Tensor) -> Tensor:
        self.clock.now_s += self.sample_s * len(inputs)
        scores: Tensor = self.layer(inputs.flatten(1))
        return scores


class Event:
    """A moment in the order of a device's own work, whose clock it has."""

    clock = Clock()

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.at_s = 0.0

    def record(self) -> None:
        self.at_s = self.clock()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        return (end.at_s - self.at_s) * 1000


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_a_gpus_forward_passes_are_timed_by_its_own_clock(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "Event", Event)
    told: list[Tensor] = []

    def gather_rows(row: Tensor) -> Tensor:
        told.append(row)
        return row.unsqueeze(0)

    group = SimpleNamespace(device=torch.device(kind), rank=0, gather_rows=gather_rows)
    plan = SimpleNamespace(is_balanced=False, batch_per_worker=(4,))
    parts = SimpleNamespace(train_loader=SimpleNamespace(plan=plan))
    balancer = LoadBalancer(cast(TrainingProgress, None), cast(Group, group), None, print)
    balancer.setup(cast(Components, parts), cast(TrainState, None), {})
    for step in range(11):
        balancer.begin_step(step, cast(Batch, SimpleNamespace(local=4)))
        Event.clock.now_s += 2.0  # which no host that only enqueues it would see
        balancer.before_backward(torch.zeros(()), 1.0)
        balancer.after_step(step)
    assert [row.tolist() for row in told] == [[2.0]]


def uneven_job() -> Job:
    """Takes ten times as long on the second of two workers, by a clock of its own."""
    slow = torch.distributed.is_initialized() and torch.distributed.get_rank() == 1
    clock = Clock()
    step_timeline.perf_counter = clock  # type: ignore[attr-defined]  # this process is forked: the change ends with it
    torch.manual_seed(1)
    return Job(
        model=Timed(clock, 0.003 if slow else 0.0003),
        train=pictures(160),
        validation=pictures(5, seed=2),
    )


@pytest.mark.ranks
@pytest.mark.slow
def test_the_slower_worker_gets_less_and_the_training_stays_the_same(tmp_path: Path) -> None:
    # Pieces of at most 4: the faster worker has more of them.
    settings = configure(epochs=3, balance=True, max_batch_per_worker=4)
    balanced: list[Outcome] = run_ranks(
        2, run_training_on, tmp_path / "balanced", uneven_job, settings, None
    )
    settings = configure(epochs=3)
    alone = run_ranks(1, run_training_on, tmp_path / "alone", uneven_job, settings, None)
    assert global_batches(balanced) == global_batches(alone)
    last = [len(indices) for _, indices in (balanced[0].trained[-1], balanced[1].trained[-1])]
    assert last[0] > 2 * last[1] > 0
    for ours, theirs in zip(balanced[0].parameters, alone[0].parameters, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_plan_cuts_by_its_shares() -> None:
    plan = TrainPlan(
        division=Division.of(None, 2),
        global_batch=8,
        batch_per_worker=(4, 4),
        micro_batches=1,
        train_samples=50,
        drop_last=False,
        steps_per_epoch=7,
    ).balanced((6, 2), 3)
    assert plan.bounds == (0, 6, 8)
    assert (plan.micro_batches, plan.micro_batch) == (2, 3)


@pytest.mark.parametrize(
    ("speeds", "shares"),
    [
        ((1.0, 1.0), None),
        ((1.0, 1.04), None),  # 51 and 49 would save 2 %: not worth it
        ((1.0, 1.5), (40, 60)),
        ((0.0, 1.5), None),  # nothing is known of one of them
    ],
)
def test_shares_change_where_a_good_deal_is_gained(
    speeds: tuple[float, float], shares: tuple[int, int] | None
) -> None:
    assert better_shares((50, 50), speeds) == shares
