from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.order import (
    EpochPlan,
    epoch_order,
    plan_order,
    plan_shares,
    step_share,
    step_shares,
    steps_in_epoch,
)
from paceline.data.splitmix import GOLDEN, MASK, Domain, derive_key, mix64
from paceline.distributed.work_division import Division, share
from paceline.errors import UsageError
from paceline.gradient_sync.ordered.reduction_tree import Node, TreeSum

SIZES = st.integers(1, 300)
WORLDS = st.integers(1, 9)


def test_the_order_is_frozen() -> None:
    """A change here is a new ORDER_VERSION: snapshots made before could not be resumed exactly."""
    assert epoch_order(10, seed=0, epoch=0).tolist() == [1, 9, 0, 8, 4, 6, 7, 2, 3, 5]
    assert epoch_order(10, seed=0, epoch=1).tolist() == [9, 1, 5, 2, 4, 7, 8, 6, 0, 3]
    assert epoch_order(10, seed=7, epoch=0).tolist() == [5, 4, 8, 1, 3, 2, 6, 9, 0, 7]


def test_the_order_sorts_splitmix64_keys() -> None:
    base = derive_key(Domain.ORDER, 3, 5)
    keys = [mix64((base + (index + 1) * GOLDEN) & MASK) for index in range(100)]
    assert epoch_order(100, 3, 5).tolist() == sorted(range(100), key=keys.__getitem__)


@pytest.mark.parametrize("epoch", [0, 3])
def test_unshuffled_samples_keep_their_own_order(epoch: int) -> None:
    plan = EpochPlan(seed=7, epoch=epoch, global_batch=4, shuffle=False)
    assert plan_order(plan, 10).tolist() == list(range(10))
    assert (
        plan_order(replace(plan, shuffle=True), 10).tolist() == epoch_order(10, 7, epoch).tolist()
    )


def test_no_sample_prefers_a_position() -> None:
    places = np.array([np.flatnonzero(epoch_order(8, 1, epoch) == 0)[0] for epoch in range(4000)])
    counts = np.bincount(places, minlength=8)
    assert ((counts - 500) ** 2 / 500).sum() < 24.3  # chi-square, 7 degrees of freedom, p = 0.001


@given(num=SIZES, seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
@settings(max_examples=50)
def test_an_order_is_a_permutation(num: int, seed: int, epoch: int) -> None:
    order = epoch_order(num, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(num))


@given(total=st.integers(0, 1000), parts=st.integers(1, 40))
@settings(max_examples=100)
def test_shares_are_balanced_and_contiguous(total: int, parts: int) -> None:
    bounds = [share(total, part, parts) for part in range(parts)]
    sizes = [end - begin for begin, end in bounds]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == total
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@pytest.mark.parametrize(("part", "parts"), [(3, 3), (-1, 3), (0, 0)])
def test_a_part_must_exist(part: int, parts: int) -> None:
    with pytest.raises(ValueError, match=f"part {part} is none of {parts} parts"):
        share(10, part, parts)


@given(num=SIZES, batch=st.integers(1, 80), data=st.data())
@settings(max_examples=100)
def test_every_sample_once_while_the_world_changes_at_every_step(
    num: int, batch: int, data: st.DataObject
) -> None:
    order = epoch_order(num, 0, 0)
    seen: list[int] = []
    for step in range(steps_in_epoch(num, batch, drop_last=False)):
        world = data.draw(WORLDS)
        for part in range(world):
            found = step_share(num, step, batch, part, world)
            seen += order[found.start : found.stop].tolist()
    assert seen == order.tolist()  # each once, and the same global order whatever the worlds were


@given(num=SIZES, batch=st.integers(1, 80), world=WORLDS, data=st.data())
@settings(max_examples=100)
@pytest.mark.slow
def test_a_plan_resumed_at_any_step_goes_on_exactly(
    num: int, batch: int, world: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, steps_in_epoch(num, batch, drop_last=False)))
    for part in range(world):
        plan = EpochPlan(seed=0, epoch=0, global_batch=batch, part=part, parts=world)
        rest = EpochPlan(
            seed=0, epoch=0, global_batch=batch, part=part, parts=world, first_step=first
        )
        assert list(plan_shares(rest, num)) == list(plan_shares(plan, num))[first:]


@pytest.mark.parametrize(
    ("num", "batch", "drop_last", "steps"),
    [(10, 5, False, 2), (10, 4, False, 3), (10, 4, True, 2), (3, 64, False, 1)],
)
def test_steps_in_epoch(num: int, batch: int, drop_last: bool, steps: int) -> None:
    assert steps_in_epoch(num, batch, drop_last) == steps
    plan = EpochPlan(seed=0, epoch=0, global_batch=batch, drop_last=drop_last)
    assert len(list(plan_shares(plan, num))) == steps


@pytest.mark.parametrize("count", [1, 2])
def test_a_resumed_epoch_goes_on_at_its_step(count: int) -> None:
    plan = EpochPlan(seed=0, epoch=0, global_batch=4, parts=4, part=1, count=count)
    whole = list(plan_shares(plan, 14))
    rest = list(plan_shares(replace(plan, first_step=2), 14))
    assert rest == [found for found in whole if found.batch_start >= 8]
    assert len(rest) < len(whole)


@pytest.mark.parametrize(("num", "drop_last"), [(3, True), (0, False), (0, True)])
def test_an_epoch_without_steps_is_refused(num: int, drop_last: bool) -> None:
    with pytest.raises(UsageError, match=f"an epoch of {num} samples has no step"):
        steps_in_epoch(num, 64, drop_last)


def test_the_short_last_batch_says_its_size() -> None:
    plan = EpochPlan(seed=0, epoch=0, global_batch=64, part=2, parts=3, first_step=1)
    (last,) = plan_shares(plan, 66)
    assert (last.total, last.stop - last.start, last.batch_start) == (2, 0, 64)


@pytest.mark.parametrize(
    "wrong", [{"global_batch": 0}, {"epoch": -1}, {"first_step": -1}, {"part": 1}]
)
def test_a_plan_checks_its_numbers(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"must be positive|none of 1 parts"):
        EpochPlan(**{"seed": 0, "epoch": 0, "global_batch": 8} | wrong)  # type: ignore[arg-type]


@given(
    num=st.integers(1, 120),
    batch=st.integers(1, 40),
    shards=st.integers(1, 12),
    data=st.data(),
)
def test_shards_see_the_same_samples_whatever_the_worlds_are(
    num: int, batch: int, shards: int, data: st.DataObject
) -> None:
    """Another number of workers at every step: each sample once, in one order, by the same tree."""
    order = epoch_order(num, 0, 0)
    seen: list[int] = []
    for step in range(steps_in_epoch(num, batch, drop_last=False)):
        world = data.draw(st.integers(1, shards))
        division = Division.of(shards, world)
        here: dict[int, list[int]] = {}
        tree = TreeSum[str](shards, lambda left, right: f"({left}+{right})")
        for rank in range(world):
            mine = division.parts_of(rank)
            plan = EpochPlan(
                seed=0,
                epoch=0,
                global_batch=batch,
                first_step=step,
                part=mine.start,
                parts=shards,
                count=len(mine),
            )
            found = step_shares(plan, num, step)
            assert [share.last for share in found] == [False] * (len(found) - 1) + [True]
            for share_ in found:
                here[share_.part] = order[share_.start : share_.stop].tolist()
            own = TreeSum[str](shards, lambda left, right: f"({left}+{right})")
            for part in mine:
                own.push(Node(0, part), str(part))
            for node, value in zip(own.nodes, own.values, strict=True):
                tree.push(node, value)
        seen += [sample for part in sorted(here) for sample in here[part]]
        assert tree.values == [expected_tree(shards)]
    assert seen == order.tolist()


def expected_tree(shards: int) -> str:
    """Sum neighbours, level by level."""
    row = [str(shard) for shard in range(shards)]
    while len(row) > 1:
        pairs = [row[at : at + 2] for at in range(0, len(row), 2)]
        row = [f"({'+'.join(pair)})" if len(pair) == 2 else pair[0] for pair in pairs]
    return row[0]
